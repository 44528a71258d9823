"""Translate grammars from GBNF, as llama.cpp, XGrammar and SGLang read it, to llguidance's Lark. GBNF is matched
character by character, but llguidance splits a text into lexemes, each as long as possible: as lexemes, `[0-9]+ [0-9]
"x"` would match nothing. So a grammar without recursion becomes one lexeme, and in a recursive one each character is a
lexeme."""

import re
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from baton.constraints.constraint import BadConstraint, check_size, quoted

_HEAD = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)  # how a rule begins, unlike anything in Lark
_TOKEN = re.compile(
    r"""(?P<blank>\s+|\#[^\n]*)
    |(?P<name>[A-Za-z0-9_-]+)(?P<head>\s*::=)?
    |"(?P<text>(?:[^"\\]|\\.)*)"
    |\[(?P<characters>(?:[^\]\\]|\\.)*)\]
    |(?P<times>[*+?]|\{\s*[0-9]+\s*(?:,\s*(?:[0-9]+\s*)?)?\})
    |(?P<mark>[()|.])""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_ROOT = "root"
_ANY = r"/[\x{0}-\x{10FFFF}]/"


class _Token(NamedTuple):
    line: int
    kind: str  # a group of _TOKEN
    value: str


def in_lark(grammar: str) -> str:
    """Return a grammar in Lark; one that is in Lark already is returned unchanged. Raises BadConstraint."""
    check_size(grammar)
    if not _HEAD.search(grammar):
        return grammar
    rules = _rules(grammar)
    names = _reached(rules)
    is_regular = _has_order(rules, names)
    known = {name: _lark_name(index, name, is_regular) for index, name in enumerate(names)}
    lines = [f"{known[name]}: {' '.join(_expression(rules[name], known, is_regular))}" for name in names]
    lark = "\n".join([f"start: {known[_ROOT]}", *lines])
    check_size(lark, " in Lark")
    return lark


def _rules(grammar: str) -> dict[str, list[_Token]]:
    """Return the tokens of each rule by name."""
    rules, tokens = dict[str, list[_Token]](), None
    for token in _tokens(grammar):
        if token.kind == "head":
            if token.value in rules:
                raise BadConstraint(f"line {token.line}", f"there is a rule {token.value[:80]} already")
            tokens = rules[token.value] = []
        elif tokens is None:
            raise BadConstraint(f"line {token.line}", "a rule is needed first: NAME ::= ...")
        else:
            tokens.append(token)
    for token in (token for tokens in rules.values() for token in tokens):
        if token.kind == "name" and token.value not in rules:
            raise BadConstraint(f"line {token.line}", f"there is no rule {token.value[:80]}")
    if _ROOT not in rules:
        raise BadConstraint("", f"has no rule {_ROOT}")
    return rules


def _tokens(grammar: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            raise BadConstraint(f"line {line}", f"is not GBNF: {grammar[at : at + 20]!r}")
        kind = found.lastgroup or ""
        if kind != "blank":
            yield _Token(line, kind, found["name"] if kind == "head" else found[kind])
        line += found[0].count("\n")
        at = found.end()


def _reached(rules: dict[str, list[_Token]]) -> list[str]:
    """Return the names of the rules that the root needs, the root first."""
    names = {_ROOT: None}
    waiting = [_ROOT]
    while waiting:
        for token in rules[waiting.pop()]:
            if token.kind == "name" and token.value not in names:
                names[token.value] = None
                waiting.append(token.value)
    return list(names)


def _has_order(rules: dict[str, list[_Token]], names: Iterable[str]) -> bool:
    """Return whether no rule is recursive."""
    try:
        TopologicalSorter(
            {name: [token.value for token in rules[name] if token.kind == "name"] for name in names}
        ).prepare()
    except CycleError:
        return False
    return True


def _lark_name(index: int, name: str, is_terminal: bool) -> str:
    rule = f"r{index}_{name.replace('-', '_')}"
    return rule.upper() if is_terminal else rule.lower()


def _expression(tokens: Iterable[_Token], known: dict[str, str], is_regular: bool) -> list[str]:
    """Return the body of a rule in Lark. `known`: names in Lark; `is_regular`: the grammar is one lexeme."""
    parts, open_lines = list[str](), list[int]()
    before = ""  # kind of the previous token in the same sequence; "": the sequence has just begun
    for line, kind, value in tokens:
        if kind == "times":
            if before in ("", "times"):
                raise BadConstraint(f"line {line}", f"there is nothing that {value} repeats")
            parts[-1] += _times(line, value)
        elif value == "(" and kind == "mark":
            open_lines.append(line)
            parts.append("(")
            kind = ""
        elif kind == "mark" and value != ".":
            parts += [value] if before else ['""', value]
            if value == ")":
                if not open_lines:
                    raise BadConstraint(f"line {line}", "a bracket is closed that was not opened")
                open_lines.pop()
            else:
                kind = ""
        else:
            parts.append(_atom(line, kind, value, known, is_regular))
        before = kind
    if open_lines:
        raise BadConstraint(f"line {open_lines[-1]}", "a bracket is not closed")
    return parts if before else [*parts, '""']


def _times(line: int, value: str) -> str:
    bounds = "".join(value.split())
    if re.fullmatch(r"\{0+(,0+)?\}", bounds):
        raise BadConstraint(f"line {line}", f"what {value} repeats is never there: leave it out")
    return bounds if "," in bounds or len(bounds) == 1 else f"{bounds[:-1]},{bounds[1:]}"


def _atom(line: int, kind: str, value: str, known: dict[str, str], is_regular: bool) -> str:
    if kind == "name":
        return known[value]
    if kind == "mark":
        return _ANY
    if kind == "characters":
        return _characters(line, value)
    text = "".join(_character(line, found) for found in _CHARACTER.finditer(value))
    if is_regular or len(text) < 2:
        return quoted(text)
    return f"({' '.join(map(quoted, text))})"


def _characters(line: int, value: str) -> str:
    """Return an expression for a class of characters, from what its brackets hold."""
    is_inverted = value.startswith("^")
    found = list(_CHARACTER.finditer(value, 1 if is_inverted else 0))
    parts, at = list[str](), 0
    while at < len(found):
        first = last = _character(line, found[at])
        if found[at + 1 : at + 2] and found[at + 1][0] == "-" and at + 2 < len(found):
            last = _character(line, found[at + 2])
            at += 2
        if last < first:
            raise BadConstraint(f"line {line}", f"the range from {first!r} to {last!r} is empty")
        parts.append(_in_class(first) if first == last else f"{_in_class(first)}-{_in_class(last)}")
        at += 1
    if not parts and not is_inverted:
        raise BadConstraint(f"line {line}", "there is no character in []")
    return f"/[{'^' if is_inverted else ''}{''.join(parts)}]/" if parts else _ANY


def _character(line: int, found: re.Match[str]) -> str:
    """Return the character that a text or a bracket expression holds."""
    *codes, escaped, plain = found.groups()
    if plain:
        return plain
    if escaped:
        if escaped in _ESCAPES or not escaped.isalnum():
            return _ESCAPES.get(escaped, escaped)
        raise BadConstraint(f"line {line}", f"there is no escape {found[0]!r}")
    code = int(next(filter(None, codes)), 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise BadConstraint(f"line {line}", f"{found[0]} is no character")
    return chr(code)


def _in_class(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
