"""Read fields of a body. An unknown field is refused by name: silently ignored, it would change the answer."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from baton.service.errors import InvalidRequest
from gateway.http.fields.kinds import ValueKind
from gateway.http.fields.tables import NOTES, Field
from gateway.request.validation import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_STOPS

# The most elements of a field, by its path; reading 90,000 biases took 60 ms.
_MOST = {
    "stopping.stop": MAX_STOPS,
    "stopping.stop_token_ids": MAX_STOP_TOKEN_IDS,
    "sampling.logit_bias": MAX_LOGIT_BIAS,
}


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are given; null counts as not given."""
    return {name: value for name, value in values.items() if value is not None}


def write(request: Any, field: Field, value: object) -> None:
    """Set a field of the request to a value from JSON. Raises InvalidRequest with the client's name of the field."""
    try:
        put(request, field.path, read_as(field.name, field.kind, value))
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(field.name, f"must be {field.kind.description}") from None


def read_as(where: str, kind: ValueKind, value: object) -> Any:
    """Return a value from JSON as its kind reads it. Raises InvalidRequest for the field `where`."""
    try:
        return kind.read(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise InvalidRequest(where, f"must be {kind.description}") from None


def check_length(where: str, value: object, most: int) -> None:
    """Raise InvalidRequest for a list or an object of more than `most` elements. This comes before they are read, as
    reading 40,000 calls took 0.3 s."""
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


def read_object(
    where: str, value: object, known: Collection[str], *, keeps_empty_lists: bool = False
) -> dict[str, Any]:
    """Return the fields of an object that are given. Null counts as not given, and so does an empty list unless
    `keeps_empty_lists`. Raises InvalidRequest if it is no object or has an unknown field."""
    if not isinstance(value, dict):
        raise InvalidRequest(where, "must be an object" if value is not None else "is missing")
    fields = {name: each for name, each in without_nulls(value).items() if keeps_empty_lists or each != []}
    if unknown := fields.keys() - set(known):
        raise InvalidRequest(f"{where}.{min(unknown)[:80]}", "is not supported here")
    return fields


def read_list(where: str, value: object, most: int) -> list[Any]:
    """Return a list of at most so many elements; null is an empty one. Raises InvalidRequest."""
    if not isinstance(value, list | None):
        raise InvalidRequest(where, "must be a list")
    check_length(where, value, most)
    return value or []


def check_notes(values: Mapping[str, Any]) -> None:
    """Check the types of fields that are ignored. Raises InvalidRequest."""
    for name in values.keys() & NOTES.keys():
        read_as(name, NOTES[name], values[name])


def check_known(
    values: Mapping[str, Any], table: Sequence[Field], neutral: Mapping[str, tuple], others: Collection[str]
) -> None:
    """Raise InvalidRequest for an unknown field, and for a `neutral` one with a value that is not listed there."""
    known = {row.name for row in table} | set(others)
    for name, value in values.items():
        if name in neutral:
            value = without_nulls(value) if isinstance(value, dict) else value
            if value not in neutral[name] or isinstance(value, bool) != isinstance(neutral[name][0], bool):
                raise InvalidRequest(name, "is not supported here")
        elif name not in known:
            raise InvalidRequest(name[:80], "is not known here; /openapi.json lists the fields of each path")


def fill_rows(request: Any, values: Mapping[str, Any], table: Sequence[Field], names: dict[str, str]) -> None:
    """Set the fields of `table` that are given; add the client's names to `names`. Raises InvalidRequest."""
    for row in table:
        if row.name in values:
            if row.path in _MOST:
                check_length(row.name, values[row.name], _MOST[row.path])
            write(request, row, values[row.name])
            names[row.path] = row.name


def read_value(values: Mapping[str, Any], name: str, kind: ValueKind, default: Any = None) -> Any:
    """Return the value of a field; without a default it must be given. Raises InvalidRequest."""
    if name not in values:
        if default is None:
            raise InvalidRequest(name, "is missing")
        return default
    return read_as(name, kind, values[name])
