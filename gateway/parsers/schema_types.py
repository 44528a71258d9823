"""Find the types that a JSON schema allows: they decide how an argument without quotation marks is read."""

from collections.abc import Iterator, Mapping
from typing import Any

from baton.constraints.json_references import referred_to

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
# Bounds on the work, as references may form a circle and many arguments may share one definition.
_MAX_SCHEMAS = 32
_MAX_VALUES = 256  # of an enum


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names, none if it does not say. `root`: the schema that its references point into.
    Only some of very many alternatives count."""
    return {name for each in _parts(schema, root) for name in _named(each)}


def property_of(root: Mapping[str, Any], name: str) -> Any:
    """Return the schema of an argument; None if the tool's schema does not list it."""
    every = (each.get("properties") for each in _parts(root, root))
    return next((each[name] for each in every if isinstance(each, dict) and name in each), None)


def _parts(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, its alternatives, and the targets of its references."""
    waiting = [schema]
    for _ in range(_MAX_SCHEMAS):
        if not waiting:
            break
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            for keyword in ("anyOf", "oneOf", "allOf"):
                waiting += listed(each.get(keyword))[-_MAX_SCHEMAS:]
            waiting.append(referred_to(root, str(each.get("$ref"))))


def _named(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names by its own keywords."""
    kinds = set(map(type, listed(schema.get("enum"))[:_MAX_VALUES]))
    if "const" in schema:
        kinds.add(type(schema["const"]))
    names = {_NAMES.get(kind, "null") for kind in kinds} | named_types(schema)
    return names or {implied for keyword, implied in _IMPLIED.items() if keyword in schema}


def named_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types in the keyword `type`."""
    types = schema.get("type")
    names = types[: len(_NAMES) + 1] if isinstance(types, list) else [types]
    return {name for name in names if isinstance(name, str)}


def listed(value: Any) -> list[Any]:
    """Return the value of a keyword if it is a list, otherwise an empty list."""
    return value if isinstance(value, list) else []
