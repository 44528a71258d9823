"""The tool calls of one choice, which the parser of its text provides in parts."""

import hashlib

from baton.v1 import inference_pb2 as pb
from gateway.parsers.calls import CallPart


class ToolCalls:
    """Add parts of calls in order with `add`, and return the calls to send now with `take`. It is made for the first
    part only, as most answers have no call."""

    __slots__ = ("num_whole", "_name", "_streams_arguments", "_num_begun", "_last", "_arguments", "_pending")

    def __init__(self, name: str, streams_arguments: bool):
        """`name`: the name of the choice, from which ids of calls derive; `streams_arguments`: parts of a call are sent
        as they come."""
        self.num_whole = 0
        self._name, self._streams_arguments = name, streams_arguments
        self._num_begun = 0
        self._last = pb.ToolCall()  # the one that has begun, until it is sent
        self._arguments: list[str] = []  # of the last call, if it is sent whole
        self._pending: list[tuple[pb.ToolCall, list[str]]] = []  # each with the parts of its arguments

    def add(self, part: CallPart, is_new: bool) -> None:
        """Add a part. One that is not new is counted but not sent, as the client has it."""
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
        """Return the calls to send, with what was added to them since the last time."""
        for call, texts in self._pending:
            call.arguments = "".join(texts)
        taken = [call for call, _ in self._pending]
        self._pending.clear()
        return taken

    def _new_id(self) -> str:
        """Return the id of the call that begins, which is the same when the request is resumed. Every chat template
        accepts an id of nine letters and digits."""
        return hashlib.sha256(f"{self._name}/{self._num_begun}".encode()).hexdigest()[:9]
