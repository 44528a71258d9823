"""The keywords of JSON Schema. One that nobody knows is refused: ignored, a slip of the pen would be no bound. What the
library would not keep to as it stands is refused too, or written otherwise."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from baton.constraints.json_names import (
    ESCAPES_WITHOUT_U,
    check_counts,
    check_texts,
    may_rewrite_names,
    mixes_names,
    plain_names,
)
from baton.constraints.json_numbers import check_numbers

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Between two words 20 blanks at most: without an end a model may write blanks for ever.
_OPTIONS: "JsonCompileOptions" = {
    "lenient": False, "coerce_one_of": False, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"
}  # fmt: skip

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


def check_schema(schema: object) -> tuple[str, str] | None:
    """Return what is wrong with the keywords of a schema and with its values, as (place, reason), or None."""
    problem = _problem(schema)
    return problem and ("".join(map(_shown, problem[0])), problem[1])


def _problem(schema: object) -> tuple[str, str] | None:
    waiting, escaped = [("", schema)], None
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
        if problem := check_numbers(found) or check_counts(found):
            return place + problem[0], problem[1]
        if not escaped and (problem := check_texts(found)):
            escaped = place + problem[0], problem[1]
    return escaped if escaped and _mixes_names(schema, may_rewrite_names(schema)) else None


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


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


def rewrite_schema(schema: Mapping[str, Any], is_strict: bool = True) -> dict[str, Any]:
    """Return a checked schema in words that the library keeps to, with its options: `uniqueItems` only where it says
    something, patterns whose classes are without NUL, names that are not written with escapes, and no `$schema`, as
    keywords that are younger than the draft it names would be ignored. `is_strict` False: what the library has no grammar
    for is left out."""
    may_rewrite = may_rewrite_names(schema)
    are_mixed = _mixes_names(schema, may_rewrite)
    options = {**_OPTIONS, "lenient": not is_strict}
    if are_mixed:
        options["json_allowed_escapes"] = ESCAPES_WITHOUT_U
    return {**_rewritten(schema, may_rewrite), "x-guidance": options}


def _mixes_names(schema: Any, are_rewritten: bool) -> bool:
    return any(mixes_names(each, are_rewritten) for each in _schemas(schema))


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and those in it."""
    waiting = [schema]
    while waiting:
        if isinstance(found := waiting.pop(), dict):
            yield found
            for keyword, value in found.items():
                waiting += (each for _, each in _inner(KEYWORDS.get(keyword, _NOTHING), "", value))


def _rewritten(schema: Any, may_rewrite: bool) -> Any:
    if isinstance(schema, list):
        return [_rewritten(each, may_rewrite) for each in schema]
    if not isinstance(schema, dict):
        return schema
    names = plain_names(schema) if may_rewrite else {}
    rewritten = {}
    for keyword, value in schema.items():
        if keyword not in names and (keyword, value) != ("uniqueItems", False) and keyword != "$schema":
            rewritten[keyword] = _rewritten_value(keyword, value, may_rewrite)
        if keyword == "properties":  # keywords with one that stands for others between them are read one by one
            rewritten.update(names)
    return rewritten


def _rewritten_value(keyword: str, value: Any, may_rewrite: bool) -> Any:
    if keyword == "pattern" and isinstance(value, str):
        return _without_nul(value)
    kind = KEYWORDS.get(keyword)  # what a reference leads to may stand where no schema was looked for
    if kind == _NAMED and isinstance(value, dict):
        is_pattern = keyword == "patternProperties"
        return {
            _without_nul(name) if is_pattern else name: _rewritten(each, may_rewrite) for name, each in value.items()
        }
    return _rewritten(value, may_rewrite) if kind in (_SCHEMA, _LIST) else value


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
