"""The keywords of JSON Schema. One that nobody knows is refused: ignored, a slip of the pen would be no bound."""

from collections.abc import Iterator

# Keyword -> what its value holds: nothing, one schema, a list of schemas, or schemas by name.
_NOTHING, _SCHEMA, _LIST, _NAMED = range(4)
_SAYS_NOTHING = ("$schema", "$id", "id", "$comment", "title", "description", "default", "examples", "example",
                 "deprecated", "readOnly", "writeOnly", "$anchor", "$dynamicAnchor", "$vocabulary")  # fmt: skip
_BOUNDS = ("type", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef", "multipleOf", "maximum", "minimum",
           "exclusiveMaximum", "exclusiveMinimum", "maxLength", "minLength", "pattern", "format", "maxItems", "minItems",
           "uniqueItems", "maxContains", "minContains", "maxProperties", "minProperties", "required",
           "dependentRequired", "dependencies", "contentEncoding", "contentMediaType")  # fmt: skip
KEYWORDS = {
    **dict.fromkeys((*_SAYS_NOTHING, *_BOUNDS), _NOTHING),
    **dict.fromkeys(
        ("additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
         "unevaluatedItems", "unevaluatedProperties", "contentSchema"), _SCHEMA
    ),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _LIST),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), _NAMED),
    "items": _SCHEMA,  # or a list of them
}  # fmt: skip


def check_schema(schema: object) -> tuple[str, str] | None:
    """Return what is wrong with the keywords of a schema, as (place, reason), or None."""
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
