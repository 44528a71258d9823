"""What a reader of calls is."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gateway.parsers.reading import AnswerSource, Malformed, Reading


class ParsedCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class CallReader:
    """Read calls of one form. `read` begins behind an opener, or at `first`, which counts at the beginning of the content
    alone."""

    openers: tuple[str, ...] = ()
    first: str = ""
    markers: tuple[str, ...] = ()
    ends_thinking = False  # a call in the reasoning is one, and its end

    def __init__(self, spelled: Mapping[str, str], tools: Mapping[str, Any], emit: Callable[[ParsedCall], None]):
        """`spelled`: each marker as it stands in the text; `tools`: schemas of parameters by name."""
        self.spelled, self.tools, self._emit = spelled, tools, emit

    def emit(self, call: ParsedCall) -> None:
        """Put a call out. Raises Malformed for arguments that are no object."""
        if not isinstance(call.arguments, dict):
            raise Malformed
        self._emit(call)

    def read(self, source: AnswerSource, opener: str) -> Reading:
        """Read calls and put each out once it is whole. Raises Malformed, Cut."""
        raise NotImplementedError
