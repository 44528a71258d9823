"""Write answers of OpenAI's Responses API: one object, or the events of a stream."""

import itertools
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.v1 import inference_pb2 as pb
from gateway.http.fields.body import ParsedBody
from gateway.http.fields.reading import without_nulls
from gateway.http.fields.tables import NOTES
from gateway.http.responses.request import TOOL_OPTIONS, is_elsewhere, names_in_namespaces
from gateway.http.wire.encoding import COMMENT, Data, Json, named_event, named_events_in_turns, to_bytes
from gateway.http.wire.writers import TokenTexts, split_parts, token_logprobs

NUM_LEVELS = 5  # of nested values in an answer in one object, down to its logprobs
_REPEATED = (
    "instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs",
    *(name for name in NOTES if name != "prompt_cache_options"),  # an object of any depth
)  # fmt: skip


@dataclass
class _Item:
    """An item of an answer. Its `text` is the reasoning, the message, or the arguments of the call."""

    kind: str  # reasoning | message | function_call
    id: str
    call: pb.ToolCall | None = None
    name: Json = field(default_factory=dict)  # the name of the call, and its namespace if it has one
    texts: list[str] = field(default_factory=list)  # parts of `text`, which would be copied for each part
    logprobs: list[pb.Logprobs] = field(default_factory=list)
    status: str = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def end(self, status: str) -> None:
        """Set the status; a call whose arguments are not whole is always incomplete."""
        self.status = status if self.call is None or _is_json(self.text) else "incomplete"

    def to_json(self, tokens: TokenTexts | None = None) -> Json:
        """Return the item in its present state; with `tokens` also its logprobs, as an iterator."""
        head = {"id": self.id, "type": self.kind, "status": self.status}
        if self.call is not None:
            return {**head, "call_id": self.call.id, **self.name, "arguments": self.text}
        content = [] if self.status == "in_progress" else [self.part(tokens)]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}

    def part(self, tokens: TokenTexts | None = None) -> Json:
        """Return the item's part of content; with `tokens` also its logprobs, as an iterator."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        logprobs = token_logprobs(self.logprobs, tokens) if tokens and self.logprobs else []
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_DELTAS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


class ResponseWriter:
    """Write one answer: items of reasoning, messages of one part each, and calls."""

    ping = COMMENT

    def __init__(self, body: ParsedBody, values: Mapping[str, Any], model: str, tokens: TokenTexts):
        """`values`: the body's, some of which an answer repeats."""
        self._tokens, self._is_stream = tokens, body.stream
        tools = [tool for tool in values.get("tools", ()) if not is_elsewhere(tool)]
        self._names = dict(names_in_namespaces(tools))  # of functions in namespaces, by the model's name
        self._id = body.id.removeprefix("resp_")
        self._numbers = itertools.count()  # of events
        self._items: list[_Item] = []  # the last one is open
        # Of tokens that no event has yet: half a character, or the beginning of a call.
        self._logprobs: list[pb.Logprobs] = []
        self._reason = pb.FINISH_REASON_UNSPECIFIED
        self._has_begun = False  # of a stream
        self._has_logprobs = False  # and so iterators in events
        self._usage = pb.Usage()  # of an answer in one object
        self._head: Json = {
            "id": body.id, "object": "response", "created_at": int(time.time()), "model": model, "error": None,
            "background": False, "parallel_tool_calls": True, "previous_response_id": None,
            "reasoning": {"effort": values.get("reasoning", {}).get("effort"), "summary": None}, "store": False,
            "text": {"format": {"type": "text"}, **without_nulls(values.get("text", {}))},
            "tool_choice": "auto", "truncation": "disabled",
            "service_tier": "default" if "service_tier" in values else None,
            **dict.fromkeys(_REPEATED), "metadata": {}, **{name: values[name] for name in (*_REPEATED, *TOOL_OPTIONS) if name in values},
            "tools": tools,
        }  # fmt: skip

    def chunk(self, prompt: int, message: pb.GenerateResponse) -> Data:
        """Return the events for a message."""
        begun = [] if self._has_begun else self._begin()
        return self._written(begun + self._events_of(message))

    def tail(self, usages: Iterable[pb.Usage]) -> Data:
        """Return the last events."""
        (usage,) = usages
        events = self._end() + self._event(f"response.{self._status}", response=self._ended(usage))
        return named_events_in_turns(events, NUM_LEVELS + 1)

    def add(self, message: pb.GenerateResponse) -> None:
        """Add a message to an answer in one object, which has the same items as its stream would."""
        self._usage.MergeFrom(message.usage)
        self._events_of(message)

    def whole(self) -> Json:
        """Return the answer in one object, for `to_bytes_in_turns` of NUM_LEVELS."""
        self._end()
        return self._ended(self._usage)

    def error_event(self, error: Json) -> bytes:
        """Return the event by which an error ends a stream, both as the schema has it and as clients read it."""
        body = error["error"]
        (value,) = self._event("error", code=body["code"], message=body["message"], param=body["param"], error=body)
        return named_event(value["type"], value)

    def _written(self, events: list[Json]) -> Data:
        if self._has_logprobs:
            return named_events_in_turns(events, 1)
        return b"".join(named_event(each["type"], each) for each in events)

    def _begin(self) -> list[Json]:
        self._has_begun = True
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _events_of(self, message: pb.GenerateResponse) -> list[Json]:
        """Return the events for the content of a message."""
        events = list[Json]()
        self._reason = message.finish_reason or self._reason
        arguments, calls = split_parts(message)
        if arguments:
            events += self._delta(arguments)
        if message.reasoning:
            events += self._within("reasoning") + self._delta(message.reasoning)
        if message.text or not (message.reasoning or message.tool_calls):
            events += self._text(message)
        for call in calls:
            events += self._open("function_call", call) + self._delta(call.arguments)
        return events

    def _text(self, message: pb.GenerateResponse) -> list[Json]:
        """Return the events for the text of a message; keep its logprobs until a text comes."""
        self._logprobs += message.logprobs
        if not message.text:
            return []
        events, logprobs = self._within("message"), self._logprobs
        self._items[-1].logprobs += logprobs
        self._has_logprobs = self._has_logprobs or bool(logprobs)
        found = token_logprobs(logprobs, self._tokens) if logprobs else []
        return events + self._delta(message.text, logprobs=found)

    def _delta(self, text: str, **more: object) -> list[Json]:
        """Return the event that adds text to the open item."""
        item = self._items[-1]
        item.texts.append(text)
        self._logprobs = []
        return self._of_item(f"{_DELTAS[item.kind]}.delta", delta=text, **more)

    def _within(self, kind: str) -> list[Json]:
        """Return the events that open an item of this kind, unless one is open."""
        return [] if self._items and self._items[-1].kind == kind else self._open(kind)

    def _open(self, kind: str, call: pb.ToolCall | None = None) -> list[Json]:
        events = self._close("completed") if self._items else []
        name = self._names.get(call.name, {"name": call.name}) if call else {}
        self._items.append(item := self._item(kind, call=call, name=name))
        events += self._event("response.output_item.added", output_index=len(self._items) - 1, item=item.to_json())
        return events + (self._of_item("response.content_part.added", part=item.part()) if call is None else [])

    def _close(self, status: str) -> list[Json]:
        """Return the events that end the open item. They repeat its text but not its logprobs, which take 13 MB for
        8,192 tokens: these were in the deltas and come again in the response, where clients read them."""
        item = self._items[-1]
        more = {"logprobs": []} if item.kind == "message" else {}
        done = {"text": item.text, **more} if item.call is None else {"arguments": item.text, **item.name}
        events = self._of_item(f"{_DELTAS[item.kind]}.done", **done)
        if item.call is None:
            events += self._of_item("response.content_part.done", part=item.part())
        item.end(status)
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item.to_json())

    def _item(self, kind: str, **values: Any) -> _Item:
        number = sum(item.kind == kind for item in self._items)
        return _Item(kind, f"{_PREFIXES[kind]}_{self._id}{f'_{number}' if number else ''}", **values)

    def _end(self) -> list[Json]:
        """Return the events that end the last item; if there is none, those of an empty message."""
        return ([] if self._items else self._open("message")) + self._close(self._status)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == pb.FINISH_REASON_LENGTH else "completed"

    def _ended(self, usage: pb.Usage) -> Json:
        return {
            # Encoded whole, as tools may have 100,000 parts, and each would be a step of the event loop.
            **{name: to_bytes(each) for name, each in self._head.items()},
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": [item.to_json(self._tokens) for item in self._items],
            "usage": _usage(usage),
        }

    def _of_item(self, kind: str, **values: object) -> list[Json]:
        item, content = self._items[-1], {"content_index": 0}
        where = {"item_id": item.id, "output_index": len(self._items) - 1, **({} if item.call else content)}
        return self._event(kind, **where, **values)

    def _event(self, kind: str, **values: object) -> list[Json]:
        """Return the event in a list, which is empty for an answer in one object."""
        if not self._is_stream:
            return []
        return [{"type": kind, "sequence_number": next(self._numbers), **values}]


def _usage(usage: pb.Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
