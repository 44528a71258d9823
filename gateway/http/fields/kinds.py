"""The kinds of values that fields have in JSON: a description, a JSON schema and a reader for each."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from baton.v1 import inference_pb2 as pb


class ValueKind(NamedTuple):
    """A kind of values. `read` returns the value, or raises ValueError or TypeError."""

    description: str
    schema: dict[str, Any]
    read: Callable[[Any], Any]


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _integer(value: object) -> int:
    if isinstance(value, float) and value.is_integer():  # which JSON schema takes for an integer
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    value.encode()  # raises for half a surrogate pair, which is no text
    return value


def _seed(value: object) -> int:
    """Return a seed of 64 bits. OpenAI's may be negative: it becomes another seed than any positive one of 63 bits."""
    seed = _integer(value)
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError
    return seed % (1 << 64)


def _strings(value: object) -> list[str]:
    return [_string(each) for each in value] if isinstance(value, list) else [_string(value)]


def _texts(value: object) -> list[str]:
    if not isinstance(value, list):
        raise TypeError
    return _strings(value)


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list):
        raise TypeError
    if set(map(type, value)) <= {int}:  # with 500,000 ids each pass costs 0.1 s
        return value
    return [_integer(each) for each in value]


def _top_k(value: object) -> int:
    return max(0, _integer(value)) if value == -1 else _integer(value)


def _pooling(value: object) -> int:
    if not isinstance(value, str) or value not in POOLINGS:
        raise ValueError
    return POOLINGS[value]


def _object_text(value: object) -> str:
    if not isinstance(value, dict):
        raise TypeError
    return _string(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _object(value: object) -> dict[str, Any]:
    _object_text(value)
    return value  # pyright: ignore[reportReturnType]


def _notes(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError
    return {_string(name): _string(each) for name, each in value.items()}


def _one_of(options: Sequence[str]) -> ValueKind:
    def read(value: object) -> str:
        if value not in options:
            raise ValueError
        return _string(value)

    return ValueKind(f"one of {', '.join(options)}", {"enum": [*options]}, read)


def _thinking_type(value: object) -> bool:
    if not isinstance(value, str) or value not in THINKING_TYPES:
        raise ValueError
    return THINKING_TYPES[value]


def _all(value: object) -> bool:
    if value != "all":
        raise ValueError
    return True


def _true(value: object) -> bool:
    if value is not True:
        raise TypeError
    return value


def _json_schema(value: object) -> str:
    """Return a JSON schema as text; it may be an object or text, as in vLLM."""
    return value if isinstance(value, str) and _string(value) else _object_text(value)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise TypeError
    return {int(token_id): _number(bias) for token_id, bias in value.items()}


_ID = {"type": "integer", "minimum": 0, "maximum": 0xFFFF_FFFF}
BOOLEAN = ValueKind("true or false", {"type": "boolean"}, _boolean)
NUMBER = ValueKind("a number", {"type": "number"}, _number)
INTEGER = ValueKind("an integer, 0 to 4294967295", _ID, _integer)
LENGTH = ValueKind(
    "an integer, 0 to 4294967295; -1: to the end", {"type": "integer", "minimum": -1, "maximum": 0xFFFF_FFFF}, _integer
)
SEED = ValueKind("an integer of 64 bits", {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 64) - 1}, _seed)
SIGNED = ValueKind("an integer", {"type": "integer", "minimum": -(1 << 31), "maximum": (1 << 31) - 1}, _integer)
STRING = ValueKind("a string", {"type": "string"}, _string)
STRINGS = ValueKind(
    "a string, or a list of strings",
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    _strings,
)
POOLINGS = {name.removeprefix("POOLING_").lower(): number for name, number in pb.Pooling.items() if number}
POOLING = ValueKind(f"one of {', '.join(POOLINGS)}", {"enum": [*POOLINGS]}, _pooling)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
EFFORT = _one_of(EFFORTS)
THINKING_TYPES = {"enabled": True, "adaptive": True, "disabled": False}
THINKING_TYPE = ValueKind(f"one of {', '.join(THINKING_TYPES)}", {"enum": [*THINKING_TYPES]}, _thinking_type)
ALL = ValueKind("all", {"const": "all"}, _all)
SUMMARY = _one_of(("auto", "concise", "detailed"))  # of reasoning; ignored, as none is made
VERBOSITY = _one_of(("low", "medium", "high"))  # ignored, as no chat template has a variable for it
TRUE = ValueKind("true", {"const": True}, _true)
TEXTS = ValueKind("a list of strings", {"type": "array", "items": {"type": "string"}}, _texts)
JSON_SCHEMA = ValueKind("a JSON schema, an object or its text", {"type": ["object", "string"]}, _json_schema)
OBJECT = ValueKind("an object", {"type": "object"}, _object)
OBJECT_TEXT = OBJECT._replace(read=_object_text)
METADATA = ValueKind("an object of strings", {"type": "object", "additionalProperties": {"type": "string"}}, _notes)
TOKEN_IDS = ValueKind("a list of token ids", {"type": "array", "items": _ID}, _token_ids)
TOP_K = ValueKind("an integer; 0 and -1: off", {"type": "integer", "minimum": -1, "maximum": 0xFFFF_FFFF}, _top_k)
LOGIT_BIAS = ValueKind(
    "an object of numbers by token id",
    {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,10}$"}, "additionalProperties": {"type": "number"}},
    _logit_bias,
)
