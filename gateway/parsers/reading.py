"""The text of an answer as it comes. What reads it is a generator that stands still (`yield`) where it needs more, so
that no decision depends on where the text is cut."""

import json
import re
from collections.abc import Generator, Iterable
from typing import Any

Reading = Generator[None, None, None]
# Outside of its strings JSON has nothing else: whatever matches is a bracket, a quotation mark, or no JSON.
_NOTABLE = re.compile(r"[^\s\w:,.+-]")
_IN_STRING = re.compile(r'["\\]')
_BLANKS = " \t\r\n"
MAX_DEPTH = 200  # of arguments, which are read by recursion


class Malformed(Exception):
    """It is no call after all."""


class Cut(Exception):
    """The answer ended within a call."""


class Markers:
    """Texts to look for; what may be the beginning of one is held back."""

    def __init__(self, texts: Iterable[str]):
        texts = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._heads = {text[:size] for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, texts), default=1) - 1

    def find(self, text: str, begin: int) -> re.Match[str] | None:
        """Return the first of them from `begin` on."""
        return self._pattern.search(text, begin)

    def num_held(self, text: str, begin: int) -> int:
        """Return how many characters at the end may begin one."""
        for size in range(min(self._longest, len(text) - begin), 0, -1):
            if text[-size:] in self._heads:
                return size
        return 0


class AnswerSource:
    """What has come, and how far it was read."""

    __slots__ = ("text", "at", "has_ended", "good")

    def __init__(self):
        self.text, self.at = "", 0
        self.has_ended = False
        self.good = 0  # everything before it is settled: what follows is read again where it turns out to be no call

    def add(self, piece: str) -> None:
        """Add what follows."""
        self.text += piece

    def forget(self) -> None:
        """Drop what was read."""
        self.text, self.at = self.text[self.at :], 0

    def need(self, num_chars: int) -> Reading:
        """Wait for as many characters. Raises Cut."""
        while len(self.text) - self.at < num_chars:
            if self.has_ended:
                raise Cut
            yield

    def peek(self) -> Generator[None, None, str]:
        """Return the next character behind blanks; "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _BLANKS:
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if self.has_ended:
                return ""
            yield

    def expect(self, *texts: str) -> Generator[None, None, str]:
        """Skip blanks, read one of these texts and return it. Raises Malformed, Cut."""
        found = yield from self.accept(*texts)
        if not found:
            raise Cut if self.has_ended and self.at == len(self.text) else Malformed
        return found

    def accept(self, *texts: str) -> Generator[None, None, str]:
        """Skip blanks and read one of these texts, if it is there; "" if it is not."""
        yield from self.peek()
        while True:
            rest = self.text[self.at : self.at + max(map(len, texts))]
            for text in texts:
                if rest.startswith(text):
                    self.at += len(text)
                    return text
            if not any(text.startswith(rest) for text in texts):
                return ""
            if self.has_ended:
                if rest:
                    raise Cut
                return ""
            yield

    def until(self, *texts: str) -> Generator[None, None, tuple[str, str]]:
        """Read up to one of these texts; return what is before it, and the text. Raises Cut."""
        markers, begin, scan = Markers(texts), self.at, self.at
        while (found := markers.find(self.text, scan)) is None:
            if self.has_ended:
                raise Cut
            scan = max(begin, len(self.text) - markers.num_held(self.text, begin))
            yield
        self.at = found.end()
        return self.text[begin : found.start()], found[0]

    def json(self) -> Generator[None, None, Any]:
        """Skip blanks and read an object or an array. Raises Malformed, Cut."""
        first = yield from self.peek()
        if first not in ("{", "["):
            raise Malformed if first else Cut
        begin = position = self.at
        depth, in_string = 0, False
        while True:
            found = (_IN_STRING if in_string else _NOTABLE).search(self.text, position)
            if found is None or (found[0] == "\\" and found.end() == len(self.text)):
                position = found.start() if found else len(self.text)
                if self.has_ended:
                    raise Cut
                yield
                continue
            position = found.end() + (found[0] == "\\")
            if found[0] == '"':
                in_string = not in_string
            elif found[0] in "{[":
                depth += 1
            elif found[0] in "}]":
                depth -= 1
            elif not in_string:
                raise Malformed
            if depth > MAX_DEPTH:
                raise Malformed
            if not depth:
                self.at = position
                return parse_json(self.text[begin:position])


def parse_json(text: str) -> Any:
    """Return the value. Raises Malformed."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Malformed from None


def _no_constant(name: str) -> None:
    raise ValueError(name)
