"""OpenAI's Responses API in the same words of baton.v1, without its state: nothing is stored, so each request brings the
whole conversation."""

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Any

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.answers import Json, TokenText, named_event, token_logprobs
from gateway.http.conversations import read_content
from gateway.http.fields import BOOLEAN, RESPONSE, RESPONSE_NEUTRAL, STRING
from gateway.http.requests import Asked, check_known, fill, new_id, read_part_of, read_value

ROLES = ("system", "developer", "user", "assistant")
PARTS = ("input_text", "output_text")
ITEM_FIELDS = ("type", "role", "content", "id", "status", "phase")  # an answer comes back with all of them
NOTES = ("user", "safety_identifier", "prompt_cache_key")  # their sender's business
LOGPROBS = "message.output_text.logprobs"
_NAMES = {"messages.messages": "input", "messages": "input", "input": "input"}
_OTHERS = ("input", "instructions", "include", "stream", "stream_options", *NOTES)
_TOLD = ("instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "service_tier", *NOTES)


def read_response(values: Mapping[str, Any]) -> Asked:
    """Read the body of /v1/responses. Raises InvalidRequest."""
    check_known(values, RESPONSE, RESPONSE_NEUTRAL, _OTHERS)
    request, names = pb.GenerateRequest(), dict(_NAMES)
    request.messages.tool_choice = pb.TOOL_CHOICE_NONE
    if "instructions" in values:
        request.messages.messages.add(role="system", content=read_value(values, "instructions", STRING))
    request.messages.messages.extend(_input(values))
    fill(request, values, RESPONSE, names)
    if _has_logprobs(values):
        request.sampling.logprobs = request.sampling.logprobs  # present, also where it is 0
    elif "top_logprobs" in values:
        raise InvalidRequest("top_logprobs", f'needs include: ["{LOGPROBS}"]')
    for name in NOTES:
        read_value(values, name, STRING, "")
    stream = read_value(values, "stream", BOOLEAN, False)
    read_part_of(values, "stream_options", ("include_obfuscation",))
    request.request_id = request.request_id or new_id()
    return Asked(f"resp_{request.request_id}", [request], names, stream)


def _has_logprobs(values: Mapping[str, Any]) -> bool:
    include = values.get("include", [])
    if not isinstance(include, list):
        raise InvalidRequest("include", "must be a list")
    for index, each in enumerate(include):
        if each != LOGPROBS:
            raise InvalidRequest(f"include[{index}]", f"is not supported here; {LOGPROBS} is")
    return bool(include)


def _input(values: Mapping[str, Any]) -> list[pb.Message]:
    items = values.get("input")
    if items is None:
        raise InvalidRequest("input", "is missing")
    if isinstance(items, str):
        return [pb.Message(role="user", content=read_value(values, "input", STRING))]
    if not isinstance(items, list) or not items:
        raise InvalidRequest("input", "must be a string, or a list of messages that is not empty")
    messages, reasoning = list[pb.Message](), ""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise InvalidRequest(where, "must be an object with role and content")
        if item.get("type") == "reasoning":
            reasoning = read_content(f"{where}.content", item.get("content") or "", ("reasoning_text",))
            continue
        messages.append(message := _message(where, item))
        if message.role == "assistant":  # the one that it led to
            message.reasoning, reasoning = reasoning, ""
    if not messages:
        raise InvalidRequest("input", "has no message")
    return messages


def _message(where: str, item: Mapping[str, Any]) -> pb.Message:
    if item.get("type", "message") != "message":
        raise InvalidRequest(f"{where}.type", "is not supported here: message and reasoning are")
    for name in item:
        if name not in ITEM_FIELDS:
            raise InvalidRequest(f"{where}.{name[:80]}", "is not known here")
    if item.get("role") not in ROLES:
        raise InvalidRequest(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    role = "system" if item["role"] == "developer" else item["role"]
    return pb.Message(role=role, content=read_content(f"{where}.content", item.get("content"), PARTS))


class ResponseForm:
    """The form of one answer: one message of one part, behind the reasoning of a model that marks it."""

    def __init__(self, asked: Asked, values: Mapping[str, Any], model: str, token_text: TokenText):
        """`values`: of the body, some of which an answer repeats."""
        self._token_text = token_text
        self._ids = {kind: kind + asked.id.removeprefix("resp") for kind in ("rs", "msg")}
        self._numbers = itertools.count()  # of events
        self._reasoning, self._text, self._logprobs = "", "", list[Json]()
        self._reason = pb.FINISH_REASON_UNSPECIFIED
        self._has_begun = self._has_message = False  # of a stream
        self._head: Json = {
            "id": asked.id, "object": "response", "created_at": int(time.time()), "model": model, "error": None,
            "background": False, "metadata": {}, "parallel_tool_calls": values.get("parallel_tool_calls", True),
            "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "store": False,
            "text": {"format": {"type": "text"}}, "tool_choice": values.get("tool_choice", "auto"), "tools": [],
            "truncation": "disabled", **{name: values.get(name) for name in _TOLD},
        }  # fmt: skip

    def chunk(self, prompt: int, message: pb.GenerateResponse) -> bytes:
        """Return the events for a message."""
        data = b"" if self._has_begun else self._begin()
        self._reason = message.finish_reason or self._reason
        if message.reasoning:
            data += self._reason_on(message.reasoning)
        if message.text or (message.logprobs and not message.reasoning):
            data += b"" if self._has_message else self._begin_message()
            logprobs = token_logprobs(message.logprobs, self._token_text)
            self._text += message.text
            self._logprobs += logprobs
            data += self._of_part("response.output_text.delta", delta=message.text, logprobs=logprobs)
        return data

    def tail(self, usages: Iterable[pb.Usage]) -> bytes:
        """Return the last events."""
        (usage,) = usages
        ended = self._ended(usage)
        item = ended["output"][-1]
        data = b"" if self._has_message else self._begin_message()
        data += self._of_part("response.output_text.done", text=self._text, logprobs=self._logprobs)
        data += self._of_part("response.content_part.done", part=item["content"][0])
        data += self._event("response.output_item.done", output_index=self._index, item=item)
        return data + self._event(f"response.{ended['status']}", response=ended)

    def whole(self, responses: list[pb.CompleteResponse]) -> Json:
        """Return the answer in one object."""
        (response,) = responses
        (choice,) = response.choices
        self._reasoning, self._text, self._reason = choice.reasoning, choice.text, choice.finish_reason
        self._logprobs = token_logprobs(choice.logprobs, self._token_text)
        return self._ended(response.usage)

    def error_event(self, error: Json) -> bytes:
        """Return the event that an error ends a stream with: in the words of its schema, and as clients look for it."""
        told = error["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"], error=told)

    def _begin(self) -> bytes:
        self._has_begun = True
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _reason_on(self, text: str) -> bytes:
        data = b""
        if not self._reasoning:
            item = {**self._thought("in_progress"), "content": []}
            data = self._event("response.output_item.added", output_index=0, item=item)
        self._reasoning += text
        where = {"item_id": self._ids["rs"], "output_index": 0, "content_index": 0}
        return data + self._event("response.reasoning_text.delta", **where, delta=text)

    def _begin_message(self) -> bytes:
        self._has_message, data = True, b""
        if self._reasoning:
            where = {"item_id": self._ids["rs"], "output_index": 0, "content_index": 0}
            data = self._event("response.reasoning_text.done", **where, text=self._reasoning)
            data += self._event("response.output_item.done", output_index=0, item=self._thought("completed"))
        item = self._item("in_progress", [])
        data += self._event("response.output_item.added", output_index=self._index, item=item)
        return data + self._of_part("response.content_part.added", part=self._part())

    @property
    def _index(self) -> int:
        return int(bool(self._reasoning))

    def _ended(self, usage: pb.Usage) -> Json:
        is_cut = self._reason == pb.FINISH_REASON_LENGTH
        status = "incomplete" if is_cut else "completed"
        thoughts = [self._thought("completed")] if self._reasoning else []
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [*thoughts, self._item(status, [self._part()])],
            "usage": _usage(usage),
        }

    def _item(self, status: str, content: list[Json]) -> Json:
        return {"id": self._ids["msg"], "type": "message", "role": "assistant", "status": status, "content": content}

    def _thought(self, status: str) -> Json:
        content = [{"type": "reasoning_text", "text": self._reasoning}]
        return {"id": self._ids["rs"], "type": "reasoning", "summary": [], "content": content, "status": status}

    def _part(self) -> Json:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}

    def _of_part(self, kind: str, **values: object) -> bytes:
        return self._event(kind, item_id=self._ids["msg"], output_index=self._index, content_index=0, **values)

    def _event(self, kind: str, **values: object) -> bytes:
        return named_event(kind, {"type": kind, "sequence_number": next(self._numbers), **values})


def _usage(usage: pb.Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
