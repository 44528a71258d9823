"""One answer of a model that marks its reasoning or its calls: text goes in as it comes, content, reasoning and calls
come out, calls whose arguments are JSON in parts. One that the answer's end cuts off is never whole: a client must not
run half of one. What turns out to be no call is content, also where a part of it was out as a call's, and so is one
that the model itself left without an end."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gateway.parsers.calls import CallPart, CallReader, CallSink
from gateway.parsers.reading import AnswerSource, Cut, Malformed, Markers, Reading

_BLANKS = " \t\r\n"
NO_SPELLINGS: Mapping[str, str] = {}
MAX_READ_AGAIN = 64 * 1024  # characters of one answer that went wrong as calls


@dataclass
class Parsed:
    """What is certain now and was not before."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)


class AnswerParser:
    """`push` the text of an answer, then `finish`. Subclasses say how it is read."""

    def __init__(self, spellings: Mapping[str, str]):
        """`spellings`: of characters that stand for control tokens, their text."""
        self._spellings = str.maketrans(dict(spellings))
        self._source, self._sink = AnswerSource(), CallSink(self._spellings)
        self._content_parts, self._thought = list[str](), list[str]()
        self.reasoning_spans = list[tuple[int, int]]()  # of characters of the answer, in order: each once it has ended
        self._is_whole = False
        self._reading = self._run()

    def push(self, piece: str) -> Parsed:
        """Take what follows; return what is certain."""
        self._source.add(piece)
        return self._take()

    def finish(self, is_whole: bool) -> Parsed:
        """Take the end of the answer; return the rest. `is_whole`: the model ended it, so that a call without
        an end is none."""
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
    """Reasoning between two tags at the beginning, then content with calls in it."""

    def __init__(
        self,
        spellings: Mapping[str, str],
        thinks: Sequence[tuple[str, str]],
        reader: type[CallReader] | None,
        tools: Mapping[str, Any],
        thinking: str,
    ):
        """`thinks`: pairs of tags around reasoning; `reader`: of calls, None: there are none; `thinking`: the tag with
        which the prompt ends, "" if it ends with none."""
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
            source.at = 0  # blanks too
        yield from self._content(bool(tag), has_called)

    def _reason(self, end: str) -> Generator[None, None, bool]:
        """Read reasoning, and say whether calls ended it. Blanks at both its ends are the format's."""
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
        """Read content and calls. `trims`: blanks at its beginning are the format's, as those before a call always
        are."""
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
        """Read calls; return False where there are none, and nothing was read. No opener counts any more once much has
        to be read again: each of those in it may begin what goes wrong again, and all the other requests would wait."""
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
            source.at = begin  # an empty section
        return source.good > begin


def spell(text: str, spellings: Mapping[str, str]) -> str:
    """Return a text of the format as it stands in answers, where characters stand for control tokens."""
    for character, token in spellings.items():
        text = text.replace(token, character)
    return text


def _without_end(held: list[str], text: str) -> str:
    """Return what is held and the text, but for the blanks at its end, which are held from now on. What is held is not
    looked at before another character comes: for each token, 640,000 blanks took 3 ms of all others' time."""
    kept = text.rstrip(_BLANKS)
    end = text[len(kept) :]
    if kept:
        kept = "".join((*held, kept))
        held.clear()
    if end:
        held.append(end)
    return kept


def _piece(source: AnswerSource, markers: Markers) -> Generator[None, None, tuple[str, str | None]]:
    """Return the text up to a marker, and the marker; "" where more may follow, None at the end."""
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
