"""One table: a field of OpenAI's requests, its form in JSON, and the field of baton.v1.GenerateRequest that says the
same. The reader of requests, the words of errors and the OpenAPI document come from it."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb


class ValueKind(NamedTuple):
    """A form of a value: in words, as JSON schema, and how it is read. `read` raises ValueError or TypeError."""

    words: str
    schema: dict[str, Any]
    read: Callable[[Any], Any]


class Field(NamedTuple):
    """`path`: of GenerateRequest, as "sampling.top_p"."""

    name: str
    path: str
    kind: ValueKind


class ReasoningOption(NamedTuple):
    """A field that says how a model is to reason. `about`: how much ("effort"), whether ("thinks"), whether it sees again what
    it has thought before ("keeps"); empty: what is not kept to, or is no matter of the template."""

    name: str
    kind: ValueKind
    about: str = ""


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _integer(value: object) -> int:
    if isinstance(value, float) and value.is_integer():  # an integer too, says JSON schema
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    value.encode()  # half a surrogate pair is no text
    return value


def _seed(value: object) -> int:
    """OpenAI's may be below 0: each is a seed of its own."""
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
    if set(map(type, value)) <= {int}:  # of 500,000 ids each step costs 0.1 s
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


def _one_of(words: Sequence[str]) -> ValueKind:
    def read(value: object) -> str:
        if value not in words:
            raise ValueError
        return _string(value)

    return ValueKind(f"one of {', '.join(words)}", {"enum": [*words]}, read)


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
    """An object, or its text: vLLM takes both."""
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
SUMMARY = _one_of(("auto", "concise", "detailed"))  # of reasoning: none is made
VERBOSITY = _one_of(("low", "medium", "high"))  # read by nobody: no chat template has a place for it
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

_KINDS = {
    FieldDescriptor.TYPE_FLOAT: NUMBER,
    FieldDescriptor.TYPE_UINT32: INTEGER,
    FieldDescriptor.TYPE_INT32: SIGNED,
    FieldDescriptor.TYPE_UINT64: SEED,
    FieldDescriptor.TYPE_BOOL: BOOLEAN,
    FieldDescriptor.TYPE_STRING: STRING,
}
_UNLIKE = {
    "top_k": TOP_K,
    "logit_bias": LOGIT_BIAS,
    "stop": STRINGS,
    "stop_token_ids": TOKEN_IDS,
    "max_tokens": LENGTH,
}


def _rows(message: Any, names: Iterable[str], before: str = "") -> tuple[Field, ...]:
    """Return rows for fields that OpenAI, or vLLM, calls by the name that they have in baton.v1."""
    kinds = {name: _UNLIKE.get(name) or _KINDS[message.fields_by_name[name].type] for name in names}
    return tuple(Field(name, before + name, kind) for name, kind in kinds.items())


_BOTH = (
    *_rows(pb.GenerateRequest.DESCRIPTOR, ("model", "request_id", "priority", "slo_class", "stream_interval_ms")),
    *_rows(
        pb.Sampling.DESCRIPTOR,
        (name for name in pb.Sampling.DESCRIPTOR.fields_by_name if name not in ("logprobs", "prompt_logprobs")),
        "sampling.",
    ),
    *_rows(pb.Stopping.DESCRIPTOR, pb.Stopping.DESCRIPTOR.fields_by_name, "stopping."),
)
CHAT = (
    *_BOTH,
    Field("max_completion_tokens", "stopping.max_tokens", LENGTH),
    Field("top_logprobs", "sampling.logprobs", INTEGER),
)
RESPONSE = (
    *(row for row in _BOTH if row.name not in ("n", "max_tokens")),
    Field("max_output_tokens", "stopping.max_tokens", INTEGER),
    Field("top_logprobs", "sampling.logprobs", INTEGER),
)
COMPLETION = (
    *_BOTH,
    *_rows(pb.Sampling.DESCRIPTOR, ("logprobs", "prompt_logprobs"), "sampling."),
    *_rows(pb.GenerateRequest.DESCRIPTOR, ("echo", "suffix")),
)

EMBEDDING = (
    *_rows(pb.EmbedRequest.DESCRIPTOR, ("model", "request_id", "priority", "slo_class", "dimensions", "normalize")),
    Field("pooling", "pooling", POOLING),
)

RERANK = _rows(pb.ScoreRequest.DESCRIPTOR, ("model", "request_id", "priority", "slo_class", "query", "instruction"))
COHERE_RERANK = tuple(row for row in RERANK if row.name != "priority")  # there the lower is first

# What the answer may be: OpenAI's response_format, and text.format of a response, Anthropic's output_config, then vLLM's
# structured_outputs. One of all of these.
FORMAT_TYPES = ("text", "json_object", "json_schema")
FORMATS = (
    Field("response_format.type", "constraint.json_object", TRUE),  # that of json_object
    Field("response_format.json_schema.schema", "constraint.json_schema", JSON_SCHEMA),
    Field("response_format.schema", "constraint.json_schema", JSON_SCHEMA),
    Field("text.format.type", "constraint.json_object", TRUE),
    Field("text.format.schema", "constraint.json_schema", JSON_SCHEMA),
    Field("output_config.format.schema", "constraint.json_schema", JSON_SCHEMA),
    Field("output_format.schema", "constraint.json_schema", JSON_SCHEMA),
)
CONSTRAINTS = (
    Field("structured_outputs.json", "constraint.json_schema", JSON_SCHEMA),
    Field("structured_outputs.json_object", "constraint.json_object", TRUE),
    Field("structured_outputs.regex", "constraint.regex", STRING),
    Field("structured_outputs.choice", "constraint.choice.texts", TEXTS),
    Field("structured_outputs.grammar", "constraint.grammar", STRING),
)
# The same as fields of the body itself: of older vLLM, of SGLang, of llama.cpp.
BARE_CONSTRAINTS = (
    Field("guided_json", "constraint.json_schema", JSON_SCHEMA),
    Field("guided_regex", "constraint.regex", STRING),
    Field("guided_choice", "constraint.choice.texts", TEXTS),
    Field("guided_grammar", "constraint.grammar", STRING),
    Field("regex", "constraint.regex", STRING),
    Field("ebnf", "constraint.grammar", STRING),
    Field("json_schema", "constraint.json_schema", JSON_SCHEMA),
    Field("grammar", "constraint.grammar", STRING),
)

_EFFORT_OF_OPENROUTER = ReasoningOption("reasoning.effort", EFFORT, "effort")
EFFORT_OF_RESPONSE = (_EFFORT_OF_OPENROUTER,)
REASONING_OPTIONS = (
    ReasoningOption("reasoning_effort", EFFORT, "effort"),
    # DashScope's, SiliconFlow's
    ReasoningOption("enable_thinking", BOOLEAN, "thinks"),
    ReasoningOption("preserve_thinking", BOOLEAN, "keeps"),
    ReasoningOption("thinking_budget", INTEGER),
    # DeepSeek's, Z.ai's, Moonshot's, MiniMax's
    ReasoningOption("thinking.type", THINKING_TYPE, "thinks"),
    ReasoningOption("thinking.effort", EFFORT, "effort"),
    ReasoningOption("thinking.keep", ALL, "keeps"),
    ReasoningOption("thinking.clear_thinking", BOOLEAN._replace(read=lambda value: not BOOLEAN.read(value)), "keeps"),
    ReasoningOption("thinking.budget_tokens", INTEGER),
    # OpenRouter's
    _EFFORT_OF_OPENROUTER,
    ReasoningOption("reasoning.enabled", BOOLEAN, "thinks"),
    ReasoningOption("reasoning.max_tokens", INTEGER._replace(read=lambda value: INTEGER.read(value) > 0), "thinks"),
    ReasoningOption("reasoning.exclude", BOOLEAN),
    ReasoningOption("reasoning.summary", SUMMARY),
)

# Fields that nobody reads: their sender's business, or of a cache and of speculation that need no hint.
NOTES: Mapping[str, ValueKind] = {
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), STRING),
    "metadata": METADATA,
    "prompt_cache_options": OBJECT,
}

# Fields that are accepted where they ask for what is done anyway, with the values that do.
_TIERS = ("auto", "default", "flex", "scale", "priority")  # there is one
_STORE = (False, True)  # nothing is stored, as a response says: to it leaving the field out is true
_NEUTRAL = {
    "service_tier": _TIERS,
    "store": _STORE,
    "best_of": (1,),
    # Of vLLM, whose clients may send all parameters there are.
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "bad_words": ([],),
    # Of SGLang, and of llama.cpp.
    "no_stop_trim": (False,),
    "cache_prompt": (True,),
}
CHAT_NEUTRAL: Mapping[str, tuple] = {
    **_NEUTRAL,
    "modalities": (["text"],),
    "echo": (False,),
    "add_special_tokens": (False,),  # the template has them
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek", "parsed"),  # llama.cpp's two words for it, and Groq's
}
RESPONSE_NEUTRAL: Mapping[str, tuple] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": _TIERS,
    "store": _STORE,
    "truncation": ("disabled",),
}
INPUT_NEUTRAL = {name: RESPONSE_NEUTRAL[name] for name in ("conversation", "previous_response_id", "truncation")}
TOKENIZE_NEUTRAL: Mapping[str, tuple] = {"return_token_strs": (False,)}
COMPLETION_NEUTRAL: Mapping[str, tuple] = {**_NEUTRAL, "add_special_tokens": (True,)}


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are given: null is as if one were left out."""
    return {name: value for name, value in values.items() if value is not None}


def write(request: Any, field: Field, value: object) -> None:
    """Set the field of the request to a value from JSON. Raises InvalidRequest, in the client's own words."""
    try:
        put(request, field.path, field.kind.read(value))
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(field.name, f"must be {field.kind.words}") from None


def read_as(where: str, kind: ValueKind, value: object) -> Any:
    """Return a value from JSON. Raises InvalidRequest."""
    try:
        return kind.read(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise InvalidRequest(where, f"must be {kind.words}") from None


def check_length(where: str, value: object, most: int) -> None:
    """Raises InvalidRequest for a list or an object of more elements, before these are looked at: to read 40,000 calls took
    0.3 s."""
    if isinstance(value, list | dict) and len(value) > most:
        raise InvalidRequest(where, f"has {len(value)} elements, at most {most} are allowed")


def put(message: Any, path: str, value: object) -> None:
    """Set a field of a message, by its path. Raises TypeError, ValueError or OverflowError."""
    *parents, name = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    if isinstance(value, dict):
        getattr(message, name).update(value)
    elif isinstance(value, list):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)
