"""Write answers of Anthropic's Messages API: one object, or the events of a stream."""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from baton.v1 import inference_pb2 as pb
from gateway.http.anthropic.request import DISPLAYS
from gateway.http.fields.body import ParsedBody
from gateway.http.wire.encoding import Json, named_event
from gateway.http.wire.signatures import sign
from gateway.http.wire.writers import split_parts

_STOP_REASONS = {pb.FINISH_REASON_LENGTH: "max_tokens", pb.FINISH_REASON_TOOL_CALLS: "tool_use"}
_MOST = sys.float_info.max


class MessageWriter:
    """Write one answer."""

    ping = named_event("ping", {"type": "ping"})

    def __init__(self, body: ParsedBody, model: str, values: Mapping[str, Any] = {}):
        """`values`: the body's. It may ask for edits of the conversation, of which there are none, and that reasoning
        is not displayed."""
        self._id, self._model = body.id, model
        self._edits: Json = {"context_management": {"applied_edits": []}} if "context_management" in values else {}
        self._hides = values.get("thinking", {}).get("display") == DISPLAYS[1]
        self._thoughts = list[str]()  # reasoning of the open block that is not displayed
        self._has_begun = False
        self._blocks: list[str] = []  # the types of a stream's blocks so far; the last one is open
        self._end: Json = {}

    def chunk(self, prompt: int, message: pb.GenerateResponse) -> bytes:
        """Return the events for a message; a request has one prompt and one choice."""
        data = b""
        if not self._has_begun:
            self._has_begun = True
            usage = _usage(pb.Usage(prompt_tokens=message.prompt_tokens))
            empty = {**self._message([], usage), "stop_reason": None, "stop_sequence": None}
            data = _event("message_start", message=empty)
        if message.finish_reason:
            self._end = _end(message)
        arguments, calls = split_parts(message)
        if arguments:
            data += self._arguments(arguments)
        for kind, text in (("thinking", message.reasoning), ("text", message.text)):
            if not text:
                continue
            data += self._within(kind)
            if kind == "thinking" and self._hides:
                self._thoughts.append(text)
            else:
                data += self._delta({"type": f"{kind}_delta", kind: text})
        for call in calls:
            data += self._begin("tool_use", {**_use(call), "input": {}}) + self._arguments(call.arguments)
        return data

    def tail(self, usages: Iterable[pb.Usage]) -> bytes:
        """Return the last events."""
        (usage,) = usages
        data = self._within(self._blocks[-1] if self._blocks else "text") + self._close()
        end = _event("message_delta", delta=self._end, usage=_usage(usage), **self._edits)
        return data + end + _event("message_stop")

    def error_event(self, error: Json) -> bytes:
        """Return the event that an error ends a stream with."""
        return named_event("error", error)

    def whole(self, responses: list[pb.CompleteResponse]) -> Json:
        """Return the answer in one object."""
        (response,) = responses
        (choice,) = response.choices
        content = [_block("text", choice.text)] if choice.text or not (choice.reasoning or choice.tool_calls) else []
        if choice.reasoning:
            content.insert(0, _block("thinking", choice.reasoning, self._hides))
        content += [{**_use(call), "input": _input(call)} for call in choice.tool_calls]
        return {**self._message(content, _usage(response.usage)), **_end(choice), **self._edits}

    def _within(self, kind: str) -> bytes:
        """Return the events that open a block of this type, unless one is open."""
        if self._blocks and self._blocks[-1] == kind:
            return b""
        return self._begin(kind, _block(kind, ""))

    def _begin(self, kind: str, block: Json) -> bytes:
        """Return the events that close the open block, if there is one, and open this one."""
        data = self._close() if self._blocks else b""
        self._blocks.append(kind)
        return data + _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _arguments(self, text: str) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> bytes:
        signed = b""
        if self._blocks[-1] == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": sign("".join(self._thoughts), self._hides)})
            self._thoughts.clear()
        return signed + _event("content_block_stop", index=len(self._blocks) - 1)

    def _message(self, content: list[Json], usage: Json) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, "usage": usage}


def _event(kind: str, **values: object) -> bytes:
    return named_event(kind, {"type": kind, **values})


def _block(kind: str, text: str, hides: bool = False) -> Json:
    """Return a block of content; in a stream the signature of a thinking block comes at its end, and is empty here."""
    signature = {"signature": sign(text, hides) if text else ""} if kind == "thinking" else {}
    return {"type": kind, kind: "" if hides else text, **signature}


def _use(call: pb.ToolCall) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _input(call: pb.ToolCall) -> Json:
    """Return the arguments of a call. A number beyond the largest float becomes that float, as JSON has no infinity."""
    found: Json = json.loads(call.arguments, parse_float=lambda text: max(-_MOST, min(float(text), _MOST)))
    return found


def _end(part: pb.GenerateResponse | pb.Choice) -> Json:
    reason = _STOP_REASONS.get(part.finish_reason, "end_turn")
    return {"stop_reason": "stop_sequence" if part.matched_stop else reason, "stop_sequence": part.matched_stop or None}


def _usage(usage: pb.Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
