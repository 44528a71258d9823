"""Find references of a JSON schema that lead only back to themselves: an answer would never end, or have no next
token."""

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

_MAX_DIGITS = 9  # of an index into a list
_ENDLESS = "no text keeps to it: what it needs leads back to it"


def check_references(root: Any, references: Iterable[str]) -> tuple[str, str] | None:
    """Return a reference that requires itself, as (path, reason), or None."""
    targets = {reference: referred_to(root, reference) for reference in sorted(set(references))}
    graph = dict[int, set[int]]()  # by identity: there may be very many spellings of a reference
    for target in targets.values():
        if id(target) not in graph:
            graph[id(target)] = {id(targets.get(reference)) for reference in _needed(target)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        reference = next(reference for reference, target in targets.items() if id(target) in error.args[1])
        return reference.removeprefix("#")[:80], _ENDLESS
    return None


def _needed(schema: Any) -> set[str]:
    """Return the references that every value of a schema must satisfy."""
    if not isinstance(schema, dict):
        return set()
    needed = {schema["$ref"]} if isinstance(schema.get("$ref"), str) else set()
    needed.update(*map(_needed, _listed(schema.get("allOf"))), *map(_needed, _parts(schema)))
    for keyword in ("anyOf", "oneOf"):
        if options := [_needed(each) for each in _listed(schema.get(keyword))]:
            needed |= set.intersection(*options)
    return needed


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of the parts that every object or array of this schema has."""
    if schema.get("type") == "object" and isinstance(properties := schema.get("properties"), dict):
        return [
            properties[name] for name in _listed(schema.get("required")) if isinstance(name, str) and name in properties
        ]
    if schema.get("type") == "array" and isinstance(least := schema.get("minItems"), int):
        first = _listed(schema.get("prefixItems")) or _listed(schema.get("items"))
        return [*first[:least], *([schema.get("items")] if least > len(first) else [])]
    return []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def referred_to(root: Any, reference: str) -> Any:
    """Return the target of a reference within the schema; None for any other reference."""
    if reference == "#":
        return root
    found = root if reference.startswith("#/") else None
    for step in unquote(reference[2:]).split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) <= _MAX_DIGITS and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
        if found is None:  # a reference may have very many steps
            break
    return found
