"""Loosen a schema to what can be kept: a keyword that certainly cannot be kept is left out, and the others stay. Other
keywords without a grammar are left out by the library itself, if it is asked to be lenient."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from baton.constraints.constraint import BadConstraint
from baton.constraints.json_names import check_counts, check_texts, may_rewrite_names
from baton.constraints.json_numbers import check_numbers
from baton.constraints.json_patterns import has_look_around
from baton.constraints.json_references import check_references, referred_to
from baton.constraints.json_schema import has_mixed_names, schemas_in, with_inner

_TYPES = ("string", "boolean", "integer", "number", "array", "object", "null")
_UNLIKE_GRAMMAR = re.compile(r"(?<!\\)(?:\\\\)*\\[bB1-9]")  # in patterns: word boundaries, and back-references
# Removed along with `patternProperties`, as they would forbid names that its patterns allow.
_OF_NAMES = ("patternProperties", "additionalProperties", "unevaluatedProperties")


def loosened(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema without what cannot be kept. Raises BadConstraint for a schema that requires itself."""

    def loosen(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema if isinstance(schema, bool) else True
        kept = {keyword: value for keyword, value in schema.items() if _is_kept(keyword, value, root)}
        if "patternProperties" in schema and "patternProperties" not in kept:
            kept = {keyword: value for keyword, value in kept.items() if keyword not in _OF_NAMES}
        kept = _without(kept, lambda each: check_numbers(each) or check_counts(each))
        return {keyword: with_inner(keyword, value, loosen) for keyword, value in kept.items()}

    loose: dict[str, Any] = loosen(root)
    if has_mixed_names(loose, may_rewrite_names(loose)):
        loose = _without_texts(loose)
    referring = (each.get("$ref") for _, each in schemas_in(loose) if isinstance(each, dict))
    if problem := check_references(loose, (each for each in referring if isinstance(each, str))):
        raise BadConstraint(*problem)
    return loose


def _without(schema: Mapping[str, Any], check: Callable[[Mapping[str, Any]], tuple[str, str] | None]) -> dict[str, Any]:
    """Return a schema without the keywords that `check` objects to, removed one after the other."""
    kept = dict(schema)
    while problem := check(kept):
        path, _ = problem
        del kept[path.split("/")[1]]
    return kept


def _without_texts(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    kept = _without(schema, check_texts)
    return {keyword: with_inner(keyword, value, _without_texts) for keyword, value in kept.items()}


def _is_kept(keyword: str, value: Any, root: Mapping[str, Any]) -> bool:
    if keyword == "$ref":
        return isinstance(value, str) and (not value.startswith("#/") or referred_to(root, value) is not None)
    return keyword not in _SHAPES or _SHAPES[keyword](value)


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and value in _TYPES


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and not has_look_around(value) and not _UNLIKE_GRAMMAR.search(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


_SHAPES: Mapping[str, Callable[[Any], bool]] = {
    "type": lambda value: all(map(_is_type, value)) if _is_list(value) else _is_type(value),
    "pattern": _is_pattern,
    "patternProperties": lambda value: _is_object(value) and all(map(_is_pattern, value)),
    "required": lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    **dict.fromkeys(("enum", "anyOf", "oneOf", "allOf"), _is_list),
    **dict.fromkeys(("properties", "$defs", "definitions"), _is_object),
}
