"""Define readers of calls, and the parts of calls that they emit."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.parsers.reading import Cut, IncrementalText, Malformed, Reading


class ParsedCall(NamedTuple):
    """A whole call."""

    name: str
    arguments: dict[str, Any]


class CallPart(NamedTuple):
    """A part of a call. A part with a name begins a call; one without a name continues the previous part's."""

    name: str
    arguments: str  # of a JSON object
    is_last: bool  # the call is whole; if another begins before it is, it was malformed and counts as none


@dataclass
class _Part:
    name: str = ""
    texts: list[str] = field(default_factory=list)
    is_last: bool = False


class CallSink:
    """Gather the parts of calls until they are taken. The last character of the arguments is held until the call is
    whole, so that the arguments of a malformed call are never valid JSON."""

    def __init__(self, spellings: Mapping[int, str]):
        """`spellings`: a table for str.translate, from characters that stand for control tokens to their text."""
        self._spellings, self._parts, self._held = spellings, list[_Part](), ""

    def begin(self, name: str) -> None:
        """Begin a call, which cannot be taken back. Raises Malformed if it has no name, as it would continue the
        previous call."""
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
        """Mark the call as whole."""
        part = self._part()
        part.texts.append(self._held)
        part.is_last, self._held = True, ""

    def _part(self) -> _Part:
        if not self._parts:
            self._parts.append(_Part())
        return self._parts[-1]

    def take(self) -> list[CallPart]:
        """Return the parts that have come since the last time."""
        parts, self._parts = self._parts, []
        return [CallPart(each.name, "".join(each.texts).translate(self._spellings), each.is_last) for each in parts]


class CallReader:
    """Read calls in one format. `read` begins after an opener, or at `first`."""

    openers: tuple[str, ...] = ()
    first: str = ""  # a character that opens calls at the beginning of the content only
    markers: tuple[str, ...] = ()  # texts that are control tokens if the tokenizer has them
    ends_thinking = False  # whether a call within the reasoning counts, and ends it

    def __init__(self, spelled: Mapping[str, str], tools: Mapping[str, Any], sink: CallSink):
        """`spelled`: each marker and opener as the text has it; `tools`: schemas of parameters, by the tool's name."""
        self.spelled, self.tools, self.sink = spelled, tools, sink

    @staticmethod
    def can_name(name: str) -> bool:
        """Return whether a call in this format can name such a tool."""
        return bool(name)

    def emit(self, *calls: ParsedCall) -> None:
        """Emit whole calls. Raises Malformed for a call without a name; and, before emitting any, for arguments that
        are no JSON object."""
        texts = [dump(call.arguments) for call in calls]
        for call, text in zip(calls, texts, strict=True):
            self.sink.begin(call.name)
            self.sink.add(text)
            self.sink.end()

    def arguments(self, source: IncrementalText, name: str) -> Reading:
        """Read arguments in JSON; begin the call and emit them as they come. Raises Malformed, Cut."""
        if (first := (yield from source.peek())) != "{":
            raise Malformed if first else Cut
        self.sink.begin(name)
        yield from source.json_text(self.sink.add)

    def read(self, source: IncrementalText, opener: str) -> Reading:
        """Read calls and emit them. Raises Malformed, Cut."""
        raise NotImplementedError


def dump(arguments: object) -> str:
    """Return arguments as JSON. Raises Malformed if they are no object."""
    if not isinstance(arguments, dict):
        raise Malformed
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return text if text.isascii() else _encodable(text, arguments)
    except (TypeError, ValueError, RecursionError):
        raise Malformed from None


def _encodable(text: str, arguments: dict[str, Any]) -> str:
    """Return the text; if it has half of a surrogate pair, the same arguments escaped to ASCII."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return json.dumps(arguments)
