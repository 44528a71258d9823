"""The tool calls of one choice, which a parser of its text gives in parts."""

import hashlib

from baton.v1 import inference_pb2 as pb
from gateway.parsers.calls import CallPart


class ToolCalls:
    """Add parts in order; `take()` returns the calls that may go out now. Made with the first part: most answers have
    none."""

    __slots__ = ("num_whole", "_name", "_streams_arguments", "_num_begun", "_last", "_arguments", "_pending")

    def __init__(self, name: str, streams_arguments: bool):
        """`name`: of the choice, from which the ids are made; `streams_arguments`: parts of a call go out as they
        come."""
        self.num_whole = 0
        self._name, self._streams_arguments = name, streams_arguments
        self._num_begun = 0
        self._last = pb.ToolCall()  # that began
        self._arguments: list[str] = []  # of it, where it goes out whole
        self._pending: list[tuple[pb.ToolCall, list[str]]] = []  # each with its arguments in parts

    def add(self, part: CallPart, is_new: bool) -> None:
        """Take a part. One that is not new counts, and does not go out: the client has it."""
        if part.name:
            self._num_begun += 1
            self._last, self._arguments = pb.ToolCall(id=self._new_id(), name=part.name), []
        self.num_whole += part.is_last
        self._arguments.append(part.arguments)
        if not (self._streams_arguments or part.is_last):
            return
        text, self._arguments = "".join(self._arguments), []
        if is_new and (self._last.name or text):
            if self._last.name or not self._pending:
                self._pending.append((self._last, []))
            self._pending[-1][1].append(text)
        self._last = pb.ToolCall()

    def take(self) -> list[pb.ToolCall]:
        """Return the calls, or what was added to them, since the last time."""
        for call, texts in self._pending:
            call.arguments = "".join(texts)
        taken = [call for call, _ in self._pending]
        self._pending.clear()
        return taken

    def _new_id(self) -> str:
        """Return the id of the call that begins: the same when the request is resumed. Nine letters and digits are an
        id to every chat template."""
        return hashlib.sha256(f"{self._name}/{self._num_begun}".encode()).hexdigest()[:9]
