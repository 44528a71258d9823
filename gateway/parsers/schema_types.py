"""The types that a JSON schema allows, as far as they decide how an argument without quotation marks is written."""

from collections.abc import Mapping
from typing import Any

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_MAX_DEPTH = 8  # of references, which may be a circle


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the types that a schema names; none, where it does not say. `root`: of what its references name."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return set()
    found = {_NAMES.get(type(value), "null") for value in _list(schema.get("enum"))}
    if "const" in schema:
        found.add(_NAMES.get(type(schema["const"]), "null"))
    inner = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf")), _referred(schema.get("$ref"), root)]
    for each in inner:
        found |= types_of(each, root, depth + 1)
    kind = schema.get("type")
    return found | {name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for name in reference[2:].split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found
