"""Rewrite regular expressions for llguidance, so that bracket expressions mean what they mean in Python's re and
ECMA-262, and in patterns of a JSON schema also the dot and white space mean what they mean in ECMA-262."""

import re
from collections.abc import Mapping
from typing import Any

# A closing bracket right after the opening one is a character of the class. A class without an end matches too: to look
# for a missing end after each bracket would take time quadratic in the length of the text.
_CLASSES = re.compile(r"\\.|\[(?P<not>\^?)(?P<of>\]?(?:\\.|[^]\\])*)(?:(?P<end>\])|\\?\Z)", re.DOTALL)
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_CLASSES_AND_CODES = re.compile(rf"\\[xuU]\{{[0-9a-fA-F]+\}}|{_CLASSES.pattern}", re.DOTALL)
_POSSESSIVE = re.compile(r"(?:[*+?]|\{[0-9,]+\})\+")
_DOT = r"[[^\n\r\x{2028}\x{2029}]&&[^\x00]]"  # the library's own dot excludes the first of these only
_CLASSES_AND_DOTS = re.compile(rf"{_CLASSES.pattern}|(?P<dot>\.)", re.DOTALL)
_DOT_ALL = re.compile(r"(?<!\\)(?:\\\\)*\(\?[a-zA-Z]*s")  # ECMA-262 has no such inline flag
# A character of a class, or a range. The library would read nested classes, and operators between them.
_MEMBERS = re.compile(r"(\\.|.)(?:-(\\.|.))?", re.DOTALL)
_ESCAPED = frozenset("[]&-~")
_KINDS = frozenset(rf"\{kind}" for kind in "dDsSwW")  # cannot end a range: the hyphen beside one is a character
# The library's own include U+0085 and lack U+FEFF.
_SPACES = {r"\s": r"[[\s\x{feff}]--\x{85}]", r"\S": r"[[\S\x{85}]--\x{feff}]"}
_ESCAPES = re.compile(r"\\.", re.DOTALL)
# Control characters that JSON writes with \\u, or any other escape, or a class.
_CONTROLS = re.compile(
    r"(?P<control>[\x00-\x07\x0b\x0e-\x1f\x7f]|\\(?:[v0c]|(?:x|u00)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])))"
    rf"|{_CLASSES.pattern}",
    re.DOTALL,
)


def rewrite_classes(regex: str) -> str:
    """Return a regular expression whose bracket expressions contain no nested ones."""
    return _CLASSES.sub(lambda found: found[0] if found["end"] is None else _class(found), regex)


def repeats_for_good(regex: str) -> bool:
    """Return whether a regular expression has possessive repetition, as of Python's re. The library would read it as a
    repetition of a repetition."""
    return bool(_POSSESSIVE.search(_CLASSES_AND_CODES.sub("x", regex)))


def rewrite_pattern(pattern: str) -> str:
    """Return the pattern of a schema rewritten for the library. Its classes also exclude NUL: in a class with all
    control characters, the library takes quotation marks and backslashes for its own too."""
    wanted = _CLASSES if _DOT_ALL.search(pattern) else _CLASSES_AND_DOTS
    return wanted.sub(_rewritten, pattern)


def _rewritten(found: re.Match[str]) -> str:
    if found[0] == ".":
        return _DOT
    if found["end"] is None:
        return _with_spaces(found[0])
    return rf"[{_with_spaces(_class(found))}&&[^\x00]]"


def _class(found: re.Match[str]) -> str:
    return f"[{found['not']}{_MEMBERS.sub(_member, found['of'])}]"


def _member(found: re.Match[str]) -> str:
    ends = [f"\\{end}" if end in _ESCAPED else end for end in found.groups() if end]
    return (r"\-" if _KINDS.intersection(ends) else "-").join(ends)


def _with_spaces(text: str) -> str:
    return _ESCAPES.sub(lambda found: _SPACES.get(found[0], found[0]), text)


def asks_for_controls(pattern: str) -> bool:
    """Return whether a regular expression has, outside classes, control characters that JSON writes with `\\u`."""
    return any(found["control"] for found in _CONTROLS.finditer(pattern))


def has_look_around(pattern: object) -> bool:
    """Return whether a pattern has look-around, which the library does not support."""
    return isinstance(pattern, str) and bool(_LOOK_AROUND.search(_CLASSES.sub("x", pattern)))


# Formats that the library enforces; any other is an annotation, as JSON Schema has it (2020-12, 7.2.1).
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_LEAP_DAYS = rf"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_SECONDS = "[^:]*:[0-9]{2}:[0-5]"
_OF_FORMATS = {"date": _LEAP_DAYS, "date-time": _LEAP_DAYS + _SECONDS, "time": f"^{_SECONDS}"}


def with_valid_dates(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with what the library's formats of dates and times lack: 29 February exists in leap years only,
    and no second is the 60th, which few readers of a time accept. A schema that lists its values stays unchanged."""
    name, others = schema.get("format"), schema.get("allOf", [])
    if not isinstance(name, str) or name not in _OF_FORMATS or "enum" in schema or "const" in schema:
        return {**schema}
    if not isinstance(others, list):
        return {**schema}
    also = {"pattern": _OF_FORMATS[name]}
    return {**schema, **(also if "pattern" not in schema else {"allOf": [*others, also]})}
