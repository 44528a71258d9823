"""The keywords of JSON Schema. One that nobody knows is refused: ignored, a slip of the pen would be no bound. What the
library would not keep to as it stands is refused too, or written otherwise."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from baton.constraints.json_numbers import check_numbers

# Keyword -> what its value holds: nothing, one schema, a list of schemas, or schemas by name.
_NOTHING, _SCHEMA, _LIST, _NAMED = range(4)
SAYS_NOTHING = ("$schema", "$id", "id", "$comment", "title", "description", "default", "examples", "example",
                "deprecated", "readOnly", "writeOnly", "$anchor", "$dynamicAnchor", "$vocabulary",
                "discriminator")  # fmt: skip
_BOUNDS = ("type", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef", "multipleOf", "maximum", "minimum",
           "exclusiveMaximum", "exclusiveMinimum", "maxLength", "minLength", "pattern", "format", "maxItems", "minItems",
           "uniqueItems", "maxContains", "minContains", "maxProperties", "minProperties", "required",
           "dependentRequired", "dependencies", "contentEncoding", "contentMediaType")  # fmt: skip
KEYWORDS = {
    **dict.fromkeys((*SAYS_NOTHING, *_BOUNDS), _NOTHING),
    **dict.fromkeys(
        ("additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
         "unevaluatedItems", "unevaluatedProperties", "contentSchema"), _SCHEMA
    ),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _LIST),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), _NAMED),
    "items": _SCHEMA,  # or a list of them
}  # fmt: skip
_BRACKETS = re.compile(r"\\.|\[\^?\]?|\]", re.DOTALL)  # a bracket that closes at once is a character
_ANY_NAME = "^(?s:.*)$"
# With these in a schema names stay as they are: the library takes no patterns that overlap, counts properties only where
# there are none, and would not find what a reference leads to.
_NAMES_AS_THEY_ARE = re.compile(
    r'"(?:patternProperties|minProperties|maxProperties)": |"\$ref": "[^"]*/additionalProperties'
)


def check_schema(schema: object) -> tuple[str, str] | None:
    """Return what is wrong with the keywords of a schema and with its numbers, as (place, reason), or None."""
    waiting = [("", schema)]
    while waiting:
        place, found = waiting.pop()
        if isinstance(found, bool):
            continue
        if not isinstance(found, dict):
            return place, f"is {type(found).__name__}, not a schema: an object, true or false"
        for keyword, value in found.items():
            where = f"{place}/{keyword[:40]}"
            if keyword not in KEYWORDS:
                return where, "is no keyword of JSON Schema that is known here"
            if keyword == "enum" and not isinstance(value, list):
                return where, "must be a list"
            waiting += _inner(KEYWORDS[keyword], where, value)
        if problem := check_numbers(found):
            return place + problem[0], problem[1]
    return None


def _inner(kind: int, where: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the schemas that a keyword holds; of another shape than it should be, the library refuses it."""
    if kind in (_LIST, _SCHEMA) and isinstance(value, list):
        for index, each in enumerate(value):
            yield f"{where}/{index}", each
    elif kind == _NAMED and isinstance(value, dict):
        for name, each in value.items():
            yield f"{where}/{name[:40]}", each
    elif kind == _SCHEMA:
        yield where, value


def with_inner(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the value of a keyword with what `change` makes of each schema that it holds."""
    kind = KEYWORDS.get(keyword, _NOTHING)
    if kind == _NAMED and isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    if kind in (_LIST, _SCHEMA) and isinstance(value, list):
        return [change(each) for each in value]
    return change(value) if kind == _SCHEMA else value


def rewrite_schema(schema: Any) -> Any:
    """Return a checked schema in words that the library keeps to: `uniqueItems` only where it says something, patterns
    whose classes are without NUL, and names that are not written with escapes."""
    return _rewritten(schema, not _NAMES_AS_THEY_ARE.search(json.dumps(schema)))


def _rewritten(schema: Any, may_rewrite_names: bool) -> Any:
    if isinstance(schema, list):
        return [_rewritten(each, may_rewrite_names) for each in schema]
    if not isinstance(schema, dict):
        return schema
    names = _plain_names(schema) if may_rewrite_names else {}
    rewritten = {}
    for keyword, value in schema.items():
        if (keyword, value) != ("uniqueItems", False) and keyword not in names:
            rewritten[keyword] = _rewritten_value(keyword, value, may_rewrite_names)
        if keyword == "properties":  # keywords with one that stands for others between them are read one by one
            rewritten.update(names)
    return rewritten


def _plain_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Return keywords by which names that are not in `properties` are free, but not written with an escape where none is
    needed: the library, which compares texts, would take a property's name with one for another name."""
    if not schema.get("properties") or schema.get("additionalProperties", True) not in (True, {}):
        return {}
    return {"patternProperties": {_ANY_NAME: True}, "additionalProperties": False}


def _rewritten_value(keyword: str, value: Any, may_rewrite_names: bool) -> Any:
    if keyword == "pattern" and isinstance(value, str):
        return _without_nul(value)
    kind = KEYWORDS.get(keyword)  # what a reference leads to may stand where no schema was looked for
    if kind == _NAMED and isinstance(value, dict):
        is_pattern = keyword == "patternProperties"
        return {
            _without_nul(name) if is_pattern else name: _rewritten(each, may_rewrite_names)
            for name, each in value.items()
        }
    return _rewritten(value, may_rewrite_names) if kind in (_SCHEMA, _LIST) else value


def _without_nul(pattern: str) -> str:
    """Return a regular expression whose classes in brackets are without NUL: where one has all control characters, the
    library also takes quotation marks and backslashes for its own."""
    depth = 0

    def rewrite(found: re.Match[str]) -> str:
        nonlocal depth
        bracket = found[0]
        if bracket.startswith("["):
            depth += 1
            return f"[{bracket}" if depth == 1 else bracket
        if bracket == "]" and depth:
            depth -= 1
            return bracket if depth else r"]&&[^\x00]]"
        return bracket

    return _BRACKETS.sub(rewrite, pattern)
