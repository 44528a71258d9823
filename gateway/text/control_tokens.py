"""Find the control tokens of a vocabulary in a text, in one pass however many there are (Gemma 3 has 6,242)."""

from collections.abc import Iterable
from typing import NamedTuple

from ahocorasick_rs import AhoCorasick, MatchKind

_BRACKETS = (("<", ">"), ("</", ">"), ("[", "]"), ("[/", "]"))


class Match(NamedTuple):
    """A control token in a text: its characters from `begin` up to `end`."""

    begin: int
    end: int


class ControlTokens:
    """The control tokens of a vocabulary. Immutable, so threads may share it; they search at the same time."""

    def __init__(self, contents: Iterable[str]):
        contents = list(contents)
        self._whole = AhoCorasick(contents, matchkind=MatchKind.LeftmostLongest)
        self._heads = AhoCorasick({content[:2] for content in contents})
        self._first = frozenset(content[0] for content in contents)
        self._joined = "\0".join(contents)
        self.characters = frozenset("".join(contents))
        self.signs = frozenset("".join(map(_signs, contents)))  # every control token has at least one of these

    def find(self, text: str) -> list[Match]:
        """Return the control tokens in `text` from left to right, without overlap; of two that begin together the
        longer."""
        return [Match(begin, end) for _, begin, end in self._whole.find_matches_as_indexes(text)]

    def may_begin_in(self, text: str) -> bool:
        """Return whether `text` may spell a control token, alone or together with the text that follows it."""
        return text[-1:] in self._first or bool(self._heads.find_matches_as_indexes(text))

    def contain(self, text: str) -> bool:
        """Return whether `text` is a part of a control token."""
        return text in self._joined

    def may_name(self, text: str) -> bool:
        """Return whether `text` spells a control token once a template puts brackets around it, as some do with
        names."""
        return any(self.find(f"{begin}{text}{end}") for begin, end in _BRACKETS)


def _signs(content: str) -> str:
    """Return the characters of a control token that do not occur in words; if it has none, its first character."""
    return "".join(c for c in content if not (c.isalnum() or c.isspace() or c == "_")) or content.strip()[:1]
