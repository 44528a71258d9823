"""Find stop strings across the pieces of an answer by Aho-Corasick: one step for each character, however many and long
the strings are."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gateway.parsers.answer_parser import NO_SPELLINGS, spell


class StopStrings:
    """The automaton of one request, shared by its choices. A state stands for the longest suffix of the text that is a
    prefix of a stop string; state 0 for none."""

    def __init__(self, stops: Iterable[str], spellings: Mapping[str, str] = NO_SPELLINGS):
        """`spellings`: from characters that stand for control tokens to their text; a stop string matches either."""
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]  # the state of the next shorter suffix
        self.depths = [0]  # characters
        self.ends = [0]  # characters of the longest stop string that ends here; 0: none does
        for stop in stops:
            self._add(stop)
            self._add(spell(stop, spellings))
        self.spellings = str.maketrans(dict(spellings))
        self._link()

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while (found := self._next[state].get(character)) is None:
            if not state:
                return 0
            state = self._fallback[state]
        return found

    def _add(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, 1):
            if (found := self._next[state].get(character)) is None:
                found = self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.depths.append(depth)
                self.ends.append(0)
            state = found
        self.ends[state] = len(stop)

    def _link(self) -> None:
        """Set the fallback of each state, in the order of their lengths."""
        states = list(self._next[0].values())
        for state in states:
            for character, deeper in self._next[state].items():
                fallback = self._fallback[deeper] = self.step(self._fallback[state], character)
                self.ends[deeper] = self.ends[deeper] or self.ends[fallback]
                states.append(deeper)


class Stopped(NamedTuple):
    """The text that can be sent, and the stop string that was found, if any."""

    text: str  # up to the match
    matched: str | None


class StopMatcher:
    """Find the stop string that ends first in the pieces of an answer; the longest, if several end there."""

    __slots__ = ("_stops", "_state", "_held")

    def __init__(self, stops: StopStrings):
        self._stops, self._state, self._held = stops, 0, ""

    def push(self, piece: str, may_end: bool = True) -> Stopped:
        """Return the text that can be sent; do not call this again once `matched` is set. `may_end` False: a stop
        string that ends in this piece is treated as text."""
        text, num_held, stops = self._held + piece, len(self._held), self._stops
        state, step, ends = self._state, stops.step, stops.ends
        for position, character in enumerate(piece, num_held + 1):
            state = step(state, character)
            if ends[state] and may_end:
                begin = position - ends[state]
                self._state, self._held = 0, ""
                return Stopped(text[:begin], text[begin:position].translate(stops.spellings))
        self._state, num_sure = state, len(text) - stops.depths[state]
        self._held = text[num_sure:]
        return Stopped(text[:num_sure], None)

    def finish(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held
