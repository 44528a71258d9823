"""The types that a JSON schema allows, as far as they decide how an argument without quotation marks is written."""

from collections.abc import Mapping
from typing import Any

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
# What is looked at, which bounds the work: references may be a circle, and many arguments may share one definition.
_MAX_SCHEMAS = 32
_MAX_VALUES = 256  # of an enum
_MAX_STEPS = 16  # of a reference


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names; none, where it does not say. `root`: of what its references name. Of very
    many alternatives some count."""
    found, waiting = set[str](), [schema]
    for _ in range(_MAX_SCHEMAS):
        if not waiting:
            break
        each = waiting.pop()
        if isinstance(each, dict):
            found |= _named(each)
            for alternatives in (each.get("anyOf"), each.get("oneOf")):
                waiting += _list(alternatives)[-_MAX_SCHEMAS:]
            waiting.append(_referred(each.get("$ref"), root))
    return found


def _named(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names without others."""
    kinds = set(map(type, _list(schema.get("enum"))[:_MAX_VALUES]))
    if "const" in schema:
        kinds.add(type(schema["const"]))
    told = schema.get("type")
    names = told[: len(_NAMES) + 1] if isinstance(told, list) else [told]
    return {_NAMES.get(kind, "null") for kind in kinds} | {name for name in names if isinstance(name, str)}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for name in reference[2:].split("/", _MAX_STEPS):
        found = found.get(name) if isinstance(found, dict) else None
    return found
