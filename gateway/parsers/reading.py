"""Read the text of an answer as it comes. A reader is a generator that yields when it needs more text, so that no
decision depends on how the text is cut into pieces."""

import json
import re
from collections.abc import Callable, Generator, Iterable
from typing import Any

Reading = Generator[None, None, None]
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # characters of a JSON string without escapes
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[\w.+/:-]*")
_NAME = re.compile(r"[\w./:-]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_MAX_WORD = 400  # characters: a client's own reader bounds the length of numbers too
_SPACED = {",": ", ", ":": ": "}
_BLANKS = " \t\r\n"
MAX_DEPTH = 200  # of nested arguments, which clients read by recursion


class Malformed(Exception):
    """The text is no call after all."""


class Cut(Exception):
    """The answer ended within a call."""


class Markers:
    """Texts to search for. Text at the end that may begin one of them has to be held back."""

    def __init__(self, texts: Iterable[str]):
        texts = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._heads = {text[:size] for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, texts), default=1) - 1

    def find(self, text: str, begin: int) -> re.Match[str] | None:
        """Return the first match of any of them from `begin` on."""
        return self._pattern.search(text, begin)

    def num_held(self, text: str, begin: int) -> int:
        """Return how many characters at the end may begin one of them."""
        for size in range(min(self._longest, len(text) - begin), 0, -1):
            if text[-size:] in self._heads:
                return size
        return 0


class IncrementalText:
    """The text of an answer that has come, and the position up to which it was read."""

    __slots__ = ("text", "at", "has_ended", "good", "_num_forgotten")

    def __init__(self):
        self.text, self.at = "", 0
        self._num_forgotten = 0  # characters
        self.has_ended = False
        self.good = 0  # text before it is settled; text after it is read again if it turns out to be no call

    @property
    def position(self) -> int:
        """Return how many characters of the answer were read."""
        return self._num_forgotten + self.at

    def add(self, piece: str) -> None:
        """Append more text. It grows in place, as no other reference to it exists meanwhile: when it was copied for
        each token, one call of 120,000 tokens took 1.2 to 24 s."""
        text, self.text = self.text, ""
        text += piece
        self.text = text

    def forget(self) -> None:
        """Drop the text that was read, once it is the larger part, as the rest is copied."""
        if self.at * 2 >= len(self.text):
            self._num_forgotten += self.at
            self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Generator[None, None, str]:
        """Skip blanks and return the next character without reading it; "" at the end."""
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
        """Skip blanks, read one of these texts and return it; "" if none comes next. Raises Cut within one."""
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
        """Read up to the end of one of these texts; return the part before it, and the text. Raises Cut."""
        markers, begin, scan = Markers(texts), self.at, self.at
        while (found := markers.find(self.text, scan)) is None:
            if self.has_ended:
                raise Cut
            scan = max(begin, len(self.text) - markers.num_held(self.text, begin))
            yield
        self.at = found.end()
        return self.text[begin : found.start()], found[0]

    def name(self) -> Generator[None, None, str]:
        """Skip blanks, read a name and return it. Raises Malformed as soon as it can be none, and Cut."""
        yield from self.peek()
        return (yield from self._word(_NAME))

    def json(self) -> Generator[None, None, Any]:
        """Skip blanks, read an object or an array and return it. Raises Malformed, Cut."""
        parts = list[str]()
        yield from self.json_text(parts.append)
        return parse_json("".join(parts))

    def json_text(self, emit: Callable[[str], None]) -> Reading:
        """Skip blanks and read an object or an array. Its text is passed to `emit` as it comes, with the blanks of
        json.dumps, and only as far as it is valid JSON. Raises Malformed, Cut."""
        if (first := (yield from self.peek())) not in ("{", "["):
            raise Malformed if first else Cut
        yield from self._json(emit, [], "v")

    def rest_of_object(self) -> Reading:
        """Read the rest of an object, after a comma in it. Raises Malformed, Cut."""
        yield from self._json(len, ["}"], "k")

    def _json(self, emit: Callable[[str], object], closers: list[str], wants: str) -> Reading:
        """Read JSON until all is closed. `closers`: the brackets that close what is open; `wants`: what may come next,
        v for a value, k for a key, other characters for themselves. Raises Malformed, Cut."""
        while True:
            if not (character := (yield from self.peek())):
                raise Cut
            if character == '"' and wants[0] in "vk":
                yield from self._string(emit)
                wants = ":" if "k" in wants else f",{closers[-1]}"
            elif character in "{[" and "v" in wants:
                closers.append("}" if character == "{" else "]")
                wants = "k}" if character == "{" else "v]"
                self._pass(emit, character)
                if len(closers) > MAX_DEPTH:
                    raise Malformed
            elif character in ",:}]":
                if character not in wants:
                    raise Malformed
                self._pass(emit, _SPACED.get(character, character))
                if character in "}]":
                    closers.pop()
                    if not closers:
                        return
                wants = f",{closers[-1]}" if character in "}]" else "k" if f"{character}{closers[-1]}" == ",}" else "v"
            elif "v" in wants:
                yield from self._scalar(emit)
                wants = f",{closers[-1]}"
            else:
                raise Malformed

    def _pass(self, emit: Callable[[str], object], text: str) -> None:
        self.at += 1
        emit(text)

    def _string(self, emit: Callable[[str], object]) -> Reading:
        """Read a string of JSON; control characters, which JSON does not allow in it, are escaped."""
        self._pass(emit, '"')
        while True:
            if found := _PLAIN.match(self.text, self.at) or _ESCAPE.match(self.text, self.at):
                self.at = found.end()
                emit(found[0])
            elif self.at == len(self.text) or _ESCAPE_BEGUN.fullmatch(self.text, self.at):
                if self.has_ended:
                    raise Cut
                yield
            elif self.text[self.at] == '"':
                self._pass(emit, '"')
                return
            elif self.text[self.at] == "\\":
                raise Malformed
            else:
                self._pass(emit, json.dumps(self.text[self.at])[1:-1])

    def _scalar(self, emit: Callable[[str], object]) -> Reading:
        """Read a number, true, false or null."""
        emit((yield from self._word(_SCALAR)))

    def _word(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Read a whole word and return it, as a part would be another word. Raises Malformed, Cut."""
        while (end := self._end_of_word()) == len(self.text) and end - self.at <= _MAX_WORD:
            if self.has_ended:
                raise Cut
            yield
        word = self.text[self.at : end]
        if len(word) > _MAX_WORD or not pattern.fullmatch(word):
            raise Malformed
        self.at = end
        return word

    def _end_of_word(self) -> int:
        found = _WORD.match(self.text, self.at)
        assert found is not None  # it matches the empty text too
        return found.end()


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises Malformed."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Malformed from None


def _no_constant(name: str) -> None:
    raise ValueError(name)
