"""Write terminals for the texts that a JSON schema allows, as llguidance reads them. Arguments without quotation marks
need these, as the library's own JSON grammar has the marks."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from baton.constraints.constraint import quoted
from baton.constraints.json_patterns import has_look_around, rewrite_pattern
from baton.constraints.json_references import referred_to
from gateway.parsers.schema_types import listed, named_types

ANY = ""
_MAX_DEPTH = 16  # of nested references and alternatives, which may form a circle
_LOOK = 16  # characters that each visited schema counts for, which bounds the work too
_UNKEPT = ("not", "if", "$dynamicRef", "$recursiveRef")
# In ECMA-262, as in the library's own JSON, digits and letters of a word are ASCII.
_OF_ECMA = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_ESCAPES = re.compile(r"\\.", re.DOTALL)
# What to escape in Lark, where a regex is on one line between slashes.
_IN_REGEX = re.compile(r"\\(.)|/|\n", re.DOTALL)


def regex(pattern: str) -> str:
    """Return an expression for the texts that the pattern matches as a whole."""
    return f"/{_IN_REGEX.sub(_escaped, pattern)}/"


def _escaped(found: re.Match[str]) -> str:
    character = found[1] or found[0]
    return {"/": r"\x2F", "\n": r"\n"}.get(character, found[0])


class TextSchemas:
    """Write terminals for schemas that may refer to parts of one root."""

    def __init__(self, root: Mapping[str, Any], count: Callable[[int], None], has_null: bool = True):
        """`count` is called with the number of characters that are written, and may raise. `has_null`: the text `null`
        stands for null."""
        self._root, self._count, self._has_null = root, count, has_null

    def expression(self, schema: Any, depth: int = 0) -> str | None:
        """Return a terminal for the texts that a schema allows, and the one for null if the schema allows that; ANY if
        it allows all texts, None if none. `format` is ignored, as an annotation of JSON Schema. Raises ValueError if a
        terminal cannot enforce the schema."""
        if not isinstance(schema, dict):
            return None if schema is False else ANY
        if depth > _MAX_DEPTH:
            raise ValueError(f"has references or alternatives more than {_MAX_DEPTH} deep")
        if unkept := next((keyword for keyword in _UNKEPT if keyword in schema), ""):
            raise ValueError(f"has {unkept}, which an argument that is text cannot keep to")
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        self._count(_LOOK + len(values or ()))
        parts = [
            _own(schema, values, self._has_null),
            *(self.expression(each, depth + 1) for each in listed(schema.get("allOf"))),
        ]
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                parts.append(_any(self.expression(each, depth + 1) for each in listed(schema[keyword])))
        if "$ref" in schema:
            reference = str(schema["$ref"])
            if (target := referred_to(self._root, reference)) is None:
                raise ValueError(f"has a $ref that names nothing here: {reference[:80]}")
            parts.append(self.expression(target, depth + 1))
        found = _all(parts)
        self._count(len(found or ANY))
        return found


def _own(schema: Mapping[str, Any], values: list[Any] | None, has_null: bool) -> str | None:
    """Return a terminal for the texts that a schema's own keywords allow. `values`: those that it lists; None: any."""
    types, ways = named_types(schema), list[str | None]()
    if not types or "string" in types:
        texts = ANY if values is None else _any(quoted(value) for value in values if isinstance(value, str))
        ways.append(_all([texts, *_bounds(schema)]))
    allows_null = "null" in types if values is None else None in values and (not types or "null" in types)
    if has_null and allows_null:
        ways.append(quoted("null"))
    return _any(ways)


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if any(type(each) is not int or each < 0 for each in (least, most or 0)):
        raise ValueError("has a minLength or maxLength that is no whole number")
    if least or most is not None:
        yield f"/(?s:.{{{least},{'' if most is None else most}}})/"
    if "pattern" in schema:
        if not isinstance(pattern := schema["pattern"], str):
            raise ValueError("has a pattern that is no text")
        if has_look_around(pattern):
            raise ValueError("has a pattern with look-around, which an argument that is text cannot keep to")
        pattern = _ESCAPES.sub(lambda found: _OF_ECMA.get(found[0], found[0]), rewrite_pattern(pattern))
        # The pattern may match anywhere. The library refuses anchors elsewhere.
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern) else "(?s:.*)"
        yield regex(f"{begin}(?:{pattern}){end}")


def _all(parts: Iterable[str | None]) -> str | None:
    bounds = list[str]()
    for part in parts:
        if part is None:
            return None
        bounds += [part] if part else []
    return f"({' & '.join(bounds)})" if bounds else ANY


def _any(parts: Iterable[str | None]) -> str | None:
    ways = [part for part in parts if part is not None]
    if ANY in ways:
        return ANY
    return f"({' | '.join(ways)})" if ways else None
