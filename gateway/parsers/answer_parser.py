"""Parse an answer of a model that marks its reasoning or its calls, as its text comes, into content, reasoning and
calls. Calls whose arguments are JSON are returned in parts. A call that is cut off with the answer never becomes whole,
as a client must not run half of it. A malformed call, or one that the model left without an end, is content, even if
parts of it were returned as a call."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gateway.parsers.calls import CallPart, CallReader, CallSink
from gateway.parsers.reading import Cut, IncrementalText, Malformed, Markers, Reading

_BLANKS = " \t\r\n"
NO_SPELLINGS: Mapping[str, str] = {}
MAX_READ_AGAIN = 64 * 1024  # characters of an answer that were read as calls and turned out to be none


@dataclass
class Parsed:
    """What has become certain since the last time."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)


class AnswerParser:
    """Parse the text of an answer by `push`, and its end by `finish`. Subclasses define the format in `_run`."""

    def __init__(self, spellings: Mapping[str, str]):
        """`spellings`: from characters that stand for control tokens to their text."""
        self._spellings = str.maketrans(dict(spellings))
        self._source, self._sink = IncrementalText(), CallSink(self._spellings)
        self._content_parts, self._thought = list[str](), list[str]()
        self.reasoning_spans = list[tuple[int, int]]()  # begins and ends in characters, once it has ended
        self._is_whole = False
        self._reading = self._run()

    def push(self, piece: str) -> Parsed:
        """Add more of the text; return what has become certain."""
        self._source.add(piece)
        return self._take()

    def finish(self, is_whole: bool) -> Parsed:
        """End the answer; return the rest. `is_whole`: the model ended it by itself, so a call without an end is
        content."""
        self._source.has_ended, self._is_whole = True, is_whole
        return self._take()

    def _take(self) -> Parsed:
        next(self._reading, None)
        parsed = Parsed("".join(self._content_parts), "".join(self._thought), self._sink.take())
        self._content_parts.clear()
        self._thought.clear()
        return parsed

    def _run(self) -> Reading:
        raise NotImplementedError

    def _add_content(self, text: str) -> None:
        self._content_parts.append(text.translate(self._spellings))

    def _think(self, text: str) -> None:
        self._thought.append(text.translate(self._spellings))


class TaggedParser(AnswerParser):
    """Parse answers with reasoning between two tags at the beginning, then content with calls in it."""

    def __init__(
        self,
        spellings: Mapping[str, str],
        thinks: Sequence[tuple[str, str]],
        reader: type[CallReader] | None,
        tools: Mapping[str, Any],
        thinking: str,
    ):
        """`thinks`: pairs of tags around reasoning; `reader` None: the answer has no calls; `thinking`: the opening tag
        that ends the prompt, "" if there is none."""
        self._thinks = {spell(begin, spellings): spell(end, spellings) for begin, end in thinks}
        self._thinking = spell(thinking, spellings)
        self._reader, self._openers, self._num_again = None, list[str](), 0
        super().__init__(spellings)
        if reader:
            spelled = {text: spell(text, spellings) for text in (*reader.markers, *reader.openers)}
            self._reader = reader(spelled, tools, self._sink)
            self._openers = [spelled[opener] for opener in reader.openers]

    def _run(self) -> Reading:
        source, tag = self._source, self._thinking
        if not tag:
            with suppress(Cut):
                tag = yield from source.accept(*self._thinks)
        has_called = False
        if tag:
            has_called = yield from self._reason(self._thinks[tag])
        else:
            source.at = 0  # blanks are content too
        yield from self._content(bool(tag), has_called)

    def _reason(self, end: str) -> Generator[None, None, bool]:
        """Read reasoning; return whether calls ended it. Blanks around it belong to the format."""
        held, reader = list[str](), self._reader
        openers = self._openers if reader and reader.ends_thinking else ()
        markers = Markers((end, *openers))
        yield from self._source.peek()
        begin = self._source.position
        while True:
            text, marker = yield from _piece(self._source, markers)
            self._think(_without_end(held, text))
            if marker == "":
                continue
            span = begin, self._source.position - len(marker or "")
            if marker is None or marker == end:
                self.reasoning_spans.append(span)
                return False
            if reader:
                if (yield from self._has_read(reader, marker)):
                    self.reasoning_spans.append(span)
                    return True
                self._think(_without_end(held, marker))
                markers = Markers((end, *self._openers))

    def _content(self, trims: bool, has_called: bool) -> Reading:
        """Read content and calls. Blanks before a call belong to the format; `trims`: so do those at the beginning."""
        source, reader, held = self._source, self._reader, list[str]()
        if trims:
            yield from source.peek()
        begin = source.at
        if reader and reader.first:
            is_call = (yield from source.peek()) == reader.first and (yield from self._has_read(reader, ""))
            has_called = has_called or is_call
            if not is_call:
                source.at = begin
        markers = Markers(self._openers)
        while True:
            text, opener = yield from _piece(source, markers)
            if opener is None:
                rest = "".join((*held, text))
                self._add_content("" if has_called and not rest.strip(_BLANKS) else rest)
                return
            self._add_content(_without_end(held, text) if reader else text)
            if opener and reader:
                if (yield from self._has_read(reader, opener)):
                    has_called = True
                    held.clear()
                else:
                    self._add_content(_without_end(held, opener))
                markers = Markers(self._openers)

    def _has_read(self, reader: CallReader, opener: str) -> Generator[None, None, bool]:
        """Read calls; return False if there are none, with nothing read. Once much text had to be read again, openers
        count no more: each in it might begin another failed attempt, for which all other requests would wait."""
        source = self._source
        source.good = begin = source.at
        try:
            yield from reader.read(source, opener)
        except (Malformed, Cut) as error:
            if isinstance(error, Cut):
                source.at = len(source.text)
                if opener and not self._is_whole:
                    return True
            self._num_again += source.at - source.good
            source.at = source.good
            if self._num_again > MAX_READ_AGAIN:
                self._openers.clear()
        if source.good == begin:
            source.at = begin  # the section of calls was empty
        return source.good > begin


def spell(text: str, spellings: Mapping[str, str]) -> str:
    """Return a text of the format with its control tokens replaced by the characters that stand for them."""
    for character, token in spellings.items():
        text = text.replace(token, character)
    return text


def _without_end(held: list[str], text: str) -> str:
    """Return the held blanks and the text, except the blanks at its end, which are now held. Held blanks are not looked
    at until another character comes: for each token, 640,000 of them would block the event loop for 3 ms."""
    kept = text.rstrip(_BLANKS)
    end = text[len(kept) :]
    if kept:
        kept = "".join((*held, kept))
        held.clear()
    if end:
        held.append(end)
    return kept


def _piece(source: IncrementalText, markers: Markers) -> Generator[None, None, tuple[str, str | None]]:
    """Return the text up to a marker, and the marker: "" if none has come yet, None at the end of the answer."""
    while True:
        if found := markers.find(source.text, source.at):
            text, marker, end = source.text[source.at : found.start()], found[0], found.end()
        elif source.has_ended:
            text, marker, end = source.text[source.at :], None, len(source.text)
        else:
            end = len(source.text) - markers.num_held(source.text, source.at)
            text, marker = source.text[source.at : end], ""
        if text or marker != "":
            source.at = end
            source.forget()
            return text, marker
        yield
