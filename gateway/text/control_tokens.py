"""Find the control tokens of a vocabulary in a text: in one pass, however many there are (Gemma 3 has 6,242)."""

from collections.abc import Iterable
from typing import NamedTuple

from ahocorasick_rs import AhoCorasick, MatchKind

_BRACKETS = (("<", ">"), ("</", ">"), ("[", "]"), ("[/", "]"))


class Match(NamedTuple):
    begin: int
    end: int


class ControlTokens:
    """Immutable, so threads may share it; they do not wait for each other while it searches."""

    def __init__(self, contents: Iterable[str]):
        contents = list(contents)
        self._whole = AhoCorasick(contents, matchkind=MatchKind.LeftmostLongest)
        self._heads = AhoCorasick({content[:2] for content in contents})
        self._first = frozenset(content[0] for content in contents)
        self._joined = "\0".join(contents)
        self.characters = frozenset("".join(contents))
        self.signs = frozenset("".join(map(_signs, contents)))  # each of them has at least one

    def find(self, text: str) -> list[Match]:
        """Return the control tokens in `text`: leftmost, at one place the longest, without overlap."""
        return [Match(begin, end) for _, begin, end in self._whole.find_matches_as_indexes(text)]

    def may_begin_in(self, text: str) -> bool:
        """Return whether `text` spells one, or could do so together with what follows."""
        return text[-1:] in self._first or bool(self._heads.find_matches_as_indexes(text))

    def contain(self, text: str) -> bool:
        """Return whether any of them has `text` in it."""
        return text in self._joined

    def may_name(self, text: str) -> bool:
        """Return whether `text` is one without its brackets, as templates put them around names."""
        return any(self.find(f"{begin}{text}{end}") for begin, end in _BRACKETS)


def _signs(content: str) -> str:
    """Return the characters of a control token that are none of words, or of one that has none its first."""
    return "".join(c for c in content if not (c.isalnum() or c.isspace() or c == "_")) or content.strip()[:1]
