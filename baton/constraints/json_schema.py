"""The keywords of JSON Schema. An unknown keyword is refused: if it were ignored, a misspelt bound would have no
effect. What the library would not keep as it stands is refused too, or rewritten."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from baton.constraints.json_names import (
    ESCAPES_WITHOUT_U,
    check_counts,
    check_texts,
    is_plain,
    may_list_names,
    may_rewrite_names,
    mixes_names,
    plain_names,
)
from baton.constraints.json_numbers import check_numbers, with_multiples
from baton.constraints.json_patterns import FORMATS, has_look_around, rewrite_pattern, with_valid_dates
from baton.constraints.json_references import check_references, referred_to

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# At most 20 blanks between two tokens of JSON: without a bound a model may write blanks for ever.
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
_UNKEPT = ("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "dependentRequired",
           "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$dynamicAnchor",
           "$recursiveRef")  # fmt: skip
# Keywords that depend on each other: with one of _BETWEEN between them, the library would read each by itself.
_TOGETHER = (("properties", "patternProperties", "additionalProperties"), ("items", "additionalItems"),
             ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))  # fmt: skip
_BETWEEN = ("const", "enum", "allOf", "anyOf", "oneOf", "$ref")


def check_schema(schema: object) -> tuple[str, str] | None:
    """Return the problem with the keywords of a schema or their values, as (path, reason), or None."""
    problem = _problem(schema)
    return problem and ("".join(map(_shown, problem[0])), problem[1])


def _problem(schema: object) -> tuple[str, str] | None:
    escaped, references = None, list[str]()
    for path, found in schemas_in(schema):
        if not isinstance(found, dict):
            return path, f"is {type(found).__name__}, not a schema: an object, true or false"
        for keyword, value in found.items():
            where = f"{path}/{keyword[:40]}"
            if keyword not in KEYWORDS:
                return where, "is no keyword of JSON Schema that is known here"
            if keyword == "enum" and not isinstance(value, list):
                return where, "must be a list"
            if keyword == "prefixItems" and isinstance(found.get("items"), list):
                return where, "stands beside a list of items, which says the same: give one of them"
        if problem := check_numbers(found) or check_counts(found):
            return path + problem[0], problem[1]
        if isinstance(reference := found.get("$ref"), str):
            references.append(reference)
        if not escaped and (problem := check_texts(found)):
            escaped = path + problem[0], problem[1]
    if escaped and has_mixed_names(schema, may_rewrite_names(schema)):
        return escaped
    return check_references(schema, references)


def check_support(schema: object) -> tuple[str, str] | None:
    """Return the keyword of a checked schema that the library does not enforce, as (path, reason), or None."""
    may_list = may_list_names(schema)
    for path, found in schemas_in(schema):
        for keyword, value in found.items():
            where = "".join(map(_shown, f"{path}/{keyword}"))
            if keyword == "pattern" and has_look_around(value) and not _says_nothing(keyword, found):
                return where, "look-around is not supported"
            is_listed = keyword == "propertyNames" and may_list and _are_listed(found, schema)
            is_kept = is_listed or _says_nothing(keyword, found)
            if (keyword in _UNKEPT or keyword == "uniqueItems") and not is_kept:
                return where, "is not supported"
    return None


def _are_listed(schema: Mapping[str, Any], root: Any) -> bool:
    if "patternProperties" in schema or not isinstance(schema.get("properties", {}), dict):
        return False
    return _listed_names(schema["propertyNames"], root) is not None


def _listed_names(names: Any, root: Any) -> list[str] | None:
    """Return the names that a value of `propertyNames` lists; None if it is anything but a list of plain names."""
    if isinstance(names, dict) and isinstance(reference := names.get("$ref"), str) and len(names) == 1:
        names = referred_to(root, reference)
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return None
    if len(said := names.keys() - {"type", *SAYS_NOTHING}) != 1:
        return None
    listed = names.get("enum", [names["const"]] if "const" in said else None)
    if not isinstance(listed, list) or not all(isinstance(name, str) and is_plain(name) for name in listed):
        return None
    return listed


def _with_listed_names(schema: Any, root: Any) -> Any:
    """Return a schema in which a `propertyNames` that lists names is replaced by `properties` of these names."""
    if not isinstance(schema, dict):
        return schema
    schema = {key: with_inner(key, value, lambda each: _with_listed_names(each, root)) for key, value in schema.items()}
    if "propertyNames" not in schema or not _are_listed(schema, root):
        return schema
    names = _listed_names(schema.pop("propertyNames"), root) or ()
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return {**schema, "properties": {name: known.get(name, others) for name in names}, "additionalProperties": False}


def schemas_in(schema: object) -> Iterator[tuple[str, Any]]:
    """Yield a schema and its inner ones, with their paths, except true and false."""
    waiting = [("", schema)]
    while waiting:
        path, found = waiting.pop()
        if not isinstance(found, bool):
            yield path, found
        if isinstance(found, dict):
            for keyword, value in found.items():
                waiting += _inner(KEYWORDS.get(keyword, _NOTHING), f"{path}/{keyword[:40]}", value)


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _inner(kind: int, where: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the subschemas of a keyword. A value of the wrong shape yields nothing; the library refuses it."""
    if kind in (_LIST, _SCHEMA) and isinstance(value, list):
        for index, each in enumerate(value):
            yield f"{where}/{index}", each
    elif kind == _NAMED and isinstance(value, dict):
        for name, each in value.items():
            yield f"{where}/{name[:40]}", each
    elif kind == _SCHEMA:
        yield where, value


def with_inner(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the value of a keyword with each of its subschemas replaced by `change(subschema)`."""
    kind = KEYWORDS.get(keyword, _NOTHING)
    if kind == _NAMED and isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    if kind in (_LIST, _SCHEMA) and isinstance(value, list):
        return [change(each) for each in value]
    return change(value) if kind == _SCHEMA else value


def part_alone(part: Any, root: Mapping[str, Any], count: Callable[[int], None]) -> dict[str, Any]:
    """Return a schema within the root as one of its own, with the targets of its references as definitions. `count` is
    called with the number of characters of each part and may raise, as nested targets are written twice."""
    definitions, names, waiting = dict[str, Any](), dict[int, str](), list[Any]()

    def placed(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        # An `$id` would redirect the references.
        kept = {keyword: value for keyword, value in schema.items() if keyword not in ("$defs", "definitions", "$id")}
        kept = {keyword: with_inner(keyword, value, placed) for keyword, value in kept.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and (target := referred_to(root, reference)) is not None:
            if id(target) not in names:
                names[id(target)] = str(len(names))
                waiting.append(target)
            kept["$ref"] = f"#/$defs/{names[id(target)]}"
        return kept

    alone = placed(part) if isinstance(part, dict) else {}
    count(len(json.dumps(alone)))
    while waiting:
        target = waiting.pop()
        definitions[names[id(target)]] = found = placed(target)
        count(len(json.dumps(found)))
    return {**alone, "$defs": definitions} if definitions else alone


def rewrite_schema(schema: Mapping[str, Any], is_strict: bool = True) -> dict[str, Any]:
    """Return a checked schema rewritten for the library, with its options: patterns as ECMA-262 means them, names
    without escapes, and no `$schema`, since the library would ignore keywords that are newer than the draft it names.
    `is_strict` False leaves out what the library has no grammar for."""
    if may_list_names(schema):
        schema = _with_listed_names(schema, schema)
    may_rewrite = may_rewrite_names(schema)
    are_mixed = has_mixed_names(schema, may_rewrite)
    options = {**_OPTIONS, "lenient": not is_strict}
    if are_mixed:
        options["json_allowed_escapes"] = ESCAPES_WITHOUT_U
    return {**_rewritten(schema, may_rewrite), "x-guidance": options}


def has_mixed_names(schema: Any, are_rewritten: bool) -> bool:
    """Return whether a schema or a subschema confuses names, so that no text may contain `\\u`. `are_rewritten`: by
    `plain_names`."""
    return any(isinstance(each, dict) and mixes_names(each, are_rewritten) for _, each in schemas_in(schema))


def _rewritten(schema: Any, may_rewrite: bool) -> Any:
    if isinstance(schema, list):
        return [_rewritten(each, may_rewrite) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = with_multiples(with_valid_dates({**schema, **(plain_names(schema) if may_rewrite else {})}))
    return {
        keyword: _rewritten_value(keyword, schema[keyword], may_rewrite)
        for keyword in _in_order(schema)
        if not _says_nothing(keyword, schema)
    }


def _in_order(schema: Mapping[str, Any]) -> Iterable[str]:
    """Return the keywords of a schema, with those that belong together next to one another."""
    if schema.keys().isdisjoint(_BETWEEN):  # as most
        return schema
    positions = {keyword: position for position, keyword in enumerate(schema)}
    for group in _TOGETHER:
        present = [keyword for keyword in group if keyword in schema]
        positions.update((keyword, positions[present[0]]) for keyword in present)
    return sorted(schema, key=positions.__getitem__)


def _says_nothing(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Return whether to leave out a keyword that constrains nothing, as the library would refuse it or misread others.
    A pattern with look-around is left out beside a known format, as zod writes both."""
    value, text_format = schema[keyword], schema.get("format")
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    if keyword == "pattern":
        return text_format in FORMATS and has_look_around(value)
    if keyword == "propertyNames":
        is_string = isinstance(value, dict) and value.get("type", "string") == "string"
        return value is True or (is_string and value.keys() <= {"type", *SAYS_NOTHING})
    if keyword == "additionalItems":
        return not isinstance(schema.get("items"), list)
    return keyword == "$schema" or (keyword == "uniqueItems" and value is False)


def _rewritten_value(keyword: str, value: Any, may_rewrite: bool) -> Any:
    if keyword == "pattern" and isinstance(value, str):
        return rewrite_pattern(value)
    kind = KEYWORDS.get(keyword)  # a reference may lead to what was not checked as a schema
    if kind == _NAMED and isinstance(value, dict):
        is_pattern = keyword == "patternProperties"
        return {
            rewrite_pattern(name) if is_pattern else name: _rewritten(each, may_rewrite) for name, each in value.items()
        }
    return _rewritten(value, may_rewrite) if kind in (_SCHEMA, _LIST) else value
