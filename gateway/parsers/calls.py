"""What a reader of calls is, and what it puts out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.parsers.reading import AnswerSource, Cut, Malformed, Reading


class ParsedCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class CallPart(NamedTuple):
    """A part of a call: one with a name begins a call, one without continues the one before."""

    name: str
    arguments: str  # of a JSON object
    is_last: bool  # the call is whole; one that another follows before it is whole went wrong, and is none


@dataclass
class _Part:
    name: str = ""
    texts: list[str] = field(default_factory=list)
    is_last: bool = False


class CallSink:
    """Gather the parts of calls until they are taken. The last character of the arguments waits for the end of their
    call: those of a call that went wrong are never JSON."""

    def __init__(self, spellings: Mapping[int, str]):
        """`spellings`: what str.translate makes of characters that stand for control tokens."""
        self._spellings, self._parts, self._held = spellings, list[_Part](), ""

    def begin(self, name: str) -> None:
        """Begin a call: no text in its place can make it undone. Raises Malformed for one without a name, which would
        continue the call before."""
        if not name:
            raise Malformed
        self._parts.append(_Part(name))
        self._held = ""

    def add(self, text: str) -> None:
        """Add to the arguments of the call that has begun."""
        text = self._held + text
        self._held = text[-1:]
        if len(text) > 1:
            self._part().texts.append(text[:-1])

    def end(self) -> None:
        """Say that the call is whole."""
        part = self._part()
        part.texts.append(self._held)
        part.is_last, self._held = True, ""

    def _part(self) -> _Part:
        if not self._parts:
            self._parts.append(_Part())
        return self._parts[-1]

    def take(self) -> list[CallPart]:
        """Return what has come since the last time."""
        parts, self._parts = self._parts, []
        return [CallPart(each.name, "".join(each.texts).translate(self._spellings), each.is_last) for each in parts]


class CallReader:
    """Read calls in one format. `read` begins behind an opener, or at `first`, which counts at the beginning of the
    content alone."""

    openers: tuple[str, ...] = ()
    first: str = ""
    markers: tuple[str, ...] = ()
    ends_thinking = False  # a call in the reasoning is one, and its end

    def __init__(self, spelled: Mapping[str, str], tools: Mapping[str, Any], sink: CallSink):
        """`spelled`: each marker as it stands in the text; `tools`: schemas of parameters by name."""
        self.spelled, self.tools, self.sink = spelled, tools, sink

    @staticmethod
    def can_name(name: str) -> bool:
        """Return whether a call can be of a tool of this name."""
        return bool(name)

    def emit(self, *calls: ParsedCall) -> None:
        """Put whole calls out. Raises Malformed for one without a name, and, before any is out, for arguments that are
        no object of JSON."""
        texts = [dump(call.arguments) for call in calls]
        for call, text in zip(calls, texts, strict=True):
            self.sink.begin(call.name)
            self.sink.add(text)
            self.sink.end()

    def arguments(self, source: AnswerSource, name: str) -> Reading:
        """Read arguments in JSON and put them out as they come, behind the beginning of the call. Raises Malformed,
        Cut."""
        if (first := (yield from source.peek())) != "{":
            raise Malformed if first else Cut
        self.sink.begin(name)
        yield from source.json_text(self.sink.add)

    def read(self, source: AnswerSource, opener: str) -> Reading:
        """Read calls and put them out. Raises Malformed, Cut."""
        raise NotImplementedError


def dump(arguments: object) -> str:
    """Return arguments as JSON. Raises Malformed for what is no object."""
    if not isinstance(arguments, dict):
        raise Malformed
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return text if text.isascii() else _encodable(text, arguments)
    except (TypeError, ValueError, RecursionError):
        raise Malformed from None


def _encodable(text: str, arguments: dict[str, Any]) -> str:
    """Return the text, or, where it has half of a surrogate pair, the same in ASCII."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return json.dumps(arguments)
