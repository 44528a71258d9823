"""Read constraints on answers in the forms of OpenAI (response_format, and text.format of a response), of Anthropic
(output_config.format), of vLLM (structured_outputs), and of SGLang, llama.cpp and older vLLM."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from baton.constraints.constraint import MAX_CHOICES
from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.fields.kinds import BOOLEAN, STRING, TEXTS, VERBOSITY
from gateway.http.fields.reading import check_length, put, read_as, read_object
from gateway.http.fields.tables import (
    BARE_CONSTRAINTS,
    CONSTRAINTS,
    FORMAT_TYPES,
    FORMATS,
    STRUCTURED_NEUTRAL,
    Field,
)

_BACKEND = "guided_decoding_backend"  # of older vLLM, ignored: there is one backend
CONSTRAINED = ("response_format", "structured_outputs", _BACKEND, *(row.name for row in BARE_CONSTRAINTS))
_NAMED = {"name", "description", "schema", "strict"}  # of response_format.json_schema
# Fields for a schema beside `type`: of llama.cpp and others, and of TGI, whose name Hugging Face's client always sends.
_BESIDE = ("schema", "value")
_read_object = partial(read_object, keeps_empty_lists=True)  # an empty list of choices has an error of its own


def read_constraint(request: pb.GenerateRequest, values: Mapping[str, Any], names: dict[str, str]) -> None:
    """Read the constraint of a body, if it has one, and add the client's names for it to `names`. A format applies to
    the text of an answer, so it is ignored if the answer must be calls. Raises InvalidRequest."""
    must_call = request.messages.tool_choice == pb.TOOL_CHOICE_REQUIRED or bool(request.messages.tool_name)
    found = dict[str, Any]()
    for name, read in _READERS.items():
        if name in values:
            found |= read(values[name])
    found |= {row.name: values[row.name] for row in BARE_CONSTRAINTS if row.name in values}
    read_as(_BACKEND, STRING, values.get(_BACKEND, ""))
    asked = [
        (row, _value(row, found[row.name])) for row in (*FORMATS, *CONSTRAINTS, *BARE_CONSTRAINTS) if row.name in found
    ]
    for row, value in asked:
        field, first = row.name.partition(".")[0], asked[0][0]
        if (row.path, value) != (first.path, asked[0][1]):
            beside = first.name.partition(".")[0]
            raise InvalidRequest(field, f"is given beside {beside}, which says something else: send one of them")
    for row, value in asked[:1]:
        if must_call and row in FORMATS:
            return
        put(request, row.path, value)
        names |= {row.path: row.name, ".".join(row.path.split(".")[:2]): row.name}
        names["constraint"] = row.name.partition(".")[0]


def _value(row: Field, value: object) -> Any:
    if row.kind is TEXTS:
        check_length(row.name, value, MAX_CHOICES)
    return read_as(row.name, row.kind, value)


def _of_format(value: object) -> dict[str, Any]:
    """Return the value of a row of FORMATS, by its name; nothing for type text. It has one of OpenAI's three types."""
    fields = _read_object("response_format", value, {"type", "json_schema", *_BESIDE})
    kind = _kind("response_format", fields)
    for name in _BESIDE:
        if name in fields:
            if others := {"type text"} if kind == "text" else fields.keys() - {"type", name}:
                raise InvalidRequest(f"response_format.{name}", f"is given beside {min(others)}")
            return {f"response_format.{name}": fields[name]}
    if kind != "json_schema":
        if "json_schema" in fields:
            raise InvalidRequest("response_format.json_schema", f"is given beside type {kind}")
        return {"response_format.type": True} if kind == "json_object" else {}
    named = _read_object("response_format.json_schema", fields.get("json_schema"), _NAMED)
    return {"response_format.json_schema.schema": named.get("schema")}  # enforced whether `strict` is true or not


def _of_text(value: object) -> dict[str, Any]:
    """Return what `_of_format` does for the Responses API, where the schema is beside the type."""
    fields = _read_object("text", value, {"format", "verbosity"})
    if "verbosity" in fields:
        read_as("text.verbosity", VERBOSITY, fields["verbosity"])
    if "format" not in fields:
        return {}
    fields = _read_object("text.format", fields["format"], _NAMED | {"type"})
    kind = _kind("text.format", fields)
    if kind != "json_schema":
        if unlike := fields.keys() - {"type"}:
            raise InvalidRequest(f"text.format.{min(unlike)}", f"is given beside type {kind}")
        return {"text.format.type": True} if kind == "json_object" else {}
    return {"text.format.schema": fields.get("schema")}


def _of_output_config(value: object) -> dict[str, Any]:
    """Return what `_of_format` does for Anthropic's Messages API, which has type json_schema only."""
    fields = _read_object("output_config", value, {"format", "effort"})
    if "format" not in fields:
        return {}
    return _of_output_format(fields["format"], "output_config.format")


def _of_output_format(value: object, where: str = "output_format") -> dict[str, Any]:
    """Return what `_of_output_config` does for this field's older name."""
    fields = _read_object(where, value, {"type", "schema"})
    if fields.get("type") != "json_schema":
        raise InvalidRequest(f"{where}.type", "must be json_schema")
    return {f"{where}.schema": fields.get("schema")}


def _kind(where: str, fields: Mapping[str, Any]) -> str:
    kind = read_as(f"{where}.type", STRING, fields.get("type"))
    if kind not in FORMAT_TYPES:
        raise InvalidRequest(f"{where}.type", f"must be {', '.join(FORMAT_TYPES[:-1])} or {FORMAT_TYPES[-1]}")
    return kind


def _of_vllm(value: object) -> dict[str, Any]:
    known = [row.name.partition(".")[2] for row in CONSTRAINTS]
    fields = _read_object("structured_outputs", value, {*known, *STRUCTURED_NEUTRAL})
    for name in fields.keys() & STRUCTURED_NEUTRAL.keys():
        where = f"structured_outputs.{name}"
        if read_as(where, BOOLEAN, fields.pop(name)) not in STRUCTURED_NEUTRAL[name]:
            raise InvalidRequest(where, "is not supported here")
    if len(fields) != 1:
        raise InvalidRequest("structured_outputs", f"must have one of {', '.join(known)}")
    return {f"structured_outputs.{name}": each for name, each in fields.items()}


# Each returns the value of one row of the tables, by the row's name, or nothing.
_READERS = {
    "response_format": _of_format,
    "text": _of_text,
    "output_config": _of_output_config,
    "output_format": _of_output_format,
    "structured_outputs": _of_vllm,
}
