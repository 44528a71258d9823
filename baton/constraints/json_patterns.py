"""Regular expressions of a JSON schema, as llguidance has to get them: a class in brackets and a dot are those of ECMA-262."""

import re
from collections.abc import Mapping
from typing import Any

# A bracket that closes a class at once is a character of it. One without an end is a match too: looked for behind each
# bracket, an end that is missing takes time as the square of the text.
_CLASSES = re.compile(r"\\.|\[(?P<not>\^?)(?P<of>\]?(?:\\.|[^]\\])*)(?:(?P<end>\])|\\?\Z)", re.DOTALL)
_DOT = r"[[^\n\r\x{2028}\x{2029}]&&[^\x00]]"  # the library's own has all but the first of these
_CLASSES_AND_DOTS = re.compile(rf"{_CLASSES.pattern}|(?P<dot>\.)", re.DOTALL)
_DOT_ALL = re.compile(r"(?<!\\)(?:\\\\)*\(\?[a-zA-Z]*s")  # not of ECMA-262
# The library reads classes in classes, and operators between them.
_OPERATORS = re.compile(r"(?P<kept>\\.)|\[|&&|--|~~", re.DOTALL)
# Control characters that JSON writes with \\u, what else is escaped, and classes.
_CONTROLS = re.compile(
    r"(?P<control>[\x00-\x07\x0b\x0e-\x1f\x7f]|\\(?:[v0c]|(?:x|u00)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])))"
    rf"|{_CLASSES.pattern}",
    re.DOTALL,
)


def rewrite_pattern(pattern: str) -> str:
    """Return a regular expression whose classes hold no other ones, and are without NUL: where one has all control
    characters, the library also takes quotation marks and backslashes for its own."""
    wanted = _CLASSES if _DOT_ALL.search(pattern) else _CLASSES_AND_DOTS
    return wanted.sub(_rewritten, pattern)


def _rewritten(found: re.Match[str]) -> str:
    if found[0] == ".":
        return _DOT
    if found["end"] is None:
        return found[0]
    return rf"[[{found['not']}{_OPERATORS.sub(_escaped, found['of'])}]&&[^\x00]]"


def _escaped(found: re.Match[str]) -> str:
    return found["kept"] or rf"{found[0][:-1]}\{found[0][-1]}"


def asks_for_controls(pattern: str) -> bool:
    """Return whether control characters that JSON writes with `\\u` stand in a regular expression, outside of classes."""
    return any(found["control"] for found in _CONTROLS.finditer(pattern))


_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_WITH_LEAP_DAYS = rf"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"


def with_leap_days(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of dates in which 29 February is one of leap years alone. What lists its values stays as it is."""
    also, others = {"pattern": _WITH_LEAP_DAYS}, schema.get("allOf", [])
    if "enum" in schema or "const" in schema or not isinstance(others, list):
        return {**schema}
    return {**schema, **(also if "pattern" not in schema else {"allOf": [*others, also]})}
