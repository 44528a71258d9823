"""Regular expressions of a JSON schema, as llguidance has to get them: a class in brackets is that of ECMA-262."""

import re

# A bracket that closes a class at once is a character of it. One without an end is a match too: looked for behind each
# bracket, an end that is missing takes time as the square of the text.
_CLASSES = re.compile(r"\\.|\[(?P<not>\^?)(?P<of>\]?(?:\\.|[^]\\])*)(?:(?P<end>\])|\\?\Z)", re.DOTALL)
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
    return _CLASSES.sub(_rewritten, pattern)


def _rewritten(found: re.Match[str]) -> str:
    if found["end"] is None:
        return found[0]
    return rf"[[{found['not']}{_OPERATORS.sub(_escaped, found['of'])}]&&[^\x00]]"


def _escaped(found: re.Match[str]) -> str:
    return found["kept"] or rf"{found[0][:-1]}\{found[0][-1]}"


def asks_for_controls(pattern: str) -> bool:
    """Return whether control characters that JSON writes with `\\u` stand in a regular expression, outside of classes."""
    return any(found["control"] for found in _CONTROLS.finditer(pattern))
