"""Anthropic's Messages API in the same words of baton.v1: its requests, its answers and its errors."""

from collections.abc import Iterable, Mapping
from typing import Any

from baton.service.errors import BatonError, InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.answers import Json, named_event
from gateway.http.conversations import read_content
from gateway.http.errors import status_of, to_json
from gateway.http.fields import BOOLEAN, INTEGER, NUMBER, STRING, STRINGS, TOP_K, Field, read_as
from gateway.http.requests import CHAT_NAMES, Asked, check_known, fill, new_id, read_value

MESSAGES = (
    Field("model", "model", STRING),
    Field("max_tokens", "stopping.max_tokens", INTEGER),
    Field("stop_sequences", "stopping.stop", STRINGS),
    Field("temperature", "sampling.temperature", NUMBER),
    Field("top_k", "sampling.top_k", TOP_K),
    Field("top_p", "sampling.top_p", NUMBER),
)
MESSAGES_NEUTRAL: Mapping[str, tuple] = {
    "service_tier": ("auto", "standard_only"),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),  # among no tools
    "tools": ([],),
}
COUNT_NEUTRAL = {name: values for name, values in MESSAGES_NEUTRAL.items() if name != "service_tier"}
_CONVERSATION = ("messages", "system", "cache_control")
_ERROR_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}


def read_request(values: Mapping[str, Any]) -> Asked:
    """Read the body of /v1/messages. Raises InvalidRequest."""
    check_known(values, MESSAGES, MESSAGES_NEUTRAL, (*_CONVERSATION, "stream", "metadata"))
    request, names = pb.GenerateRequest(request_id=new_id()), dict(CHAT_NAMES)
    request.messages.CopyFrom(_conversation(values))
    fill(request, values, MESSAGES, names)
    if not request.stopping.HasField("max_tokens"):
        raise InvalidRequest("max_tokens", "is missing")
    _check_objects(values, "metadata", "cache_control")
    stream = read_value(values, "stream", BOOLEAN, False)
    return Asked(f"msg_{request.request_id}", [request], names, stream)


def read_count(values: Mapping[str, Any]) -> pb.TokenizeRequest:
    """Read the body of /v1/messages/count_tokens. Raises InvalidRequest."""
    check_known(values, (), COUNT_NEUTRAL, (*_CONVERSATION, "model"))
    _check_objects(values, "cache_control")
    return pb.TokenizeRequest(model=read_value(values, "model", STRING, ""), messages=_conversation(values))


def _conversation(values: Mapping[str, Any]) -> pb.Messages:
    given = values.get("messages")
    if not isinstance(given, list) or not given:
        raise InvalidRequest("messages", "is missing" if given is None else "must be a list of messages, and not empty")
    messages = [_message(f"messages[{index}]", message) for index, message in enumerate(given)]
    if messages[-1].role != "user":
        raise InvalidRequest(
            "messages", "the last one must be the user's: an answer that is begun is not continued here"
        )
    system = read_content("system", values["system"]) if "system" in values else ""
    before = [pb.Message(role="system", content=system)] if system else []
    return pb.Messages(messages=[*before, *messages], tool_choice=pb.TOOL_CHOICE_NONE)


def _message(where: str, message: object) -> pb.Message:
    if not isinstance(message, dict):
        raise InvalidRequest(where, "must be an object with role and content")
    if unknown := message.keys() - {"role", "content"}:
        raise InvalidRequest(f"{where}.{min(unknown)[:80]}", "is not known here")
    if message.get("role") not in ("user", "assistant"):
        raise InvalidRequest(f"{where}.role", "must be user or assistant; system is a field of its own")
    role, content, reasoning = message["role"], message.get("content"), ""
    if role == "assistant" and isinstance(content, list):
        thoughts = {
            n: part for n, part in enumerate(content) if isinstance(part, dict) and part.get("type") == "thinking"
        }
        for n, part in thoughts.items():
            reasoning += read_as(f"{where}.content[{n}].thinking", STRING, part.get("thinking"))
        content = [_block("text", "") if n in thoughts else part for n, part in enumerate(content)]
    return pb.Message(role=role, content=read_content(f"{where}.content", content), reasoning=reasoning)


def _check_objects(values: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(values.get(name, {}), dict):
            raise InvalidRequest(name, "must be an object")


class MessageForm:
    """The form of one answer."""

    def __init__(self, asked: Asked, model: str):
        self._id, self._model = asked.id, model
        self._has_begun = False
        self._blocks: list[str] = []  # types of those of a stream, the last one open
        self._end: Json = {}

    def chunk(self, prompt: int, message: pb.GenerateResponse) -> bytes:
        """Return the events for a message; there is one choice of one prompt."""
        data = b""
        if not self._has_begun:
            self._has_begun = True
            empty = {**self._message([], _usage(pb.Usage())), "stop_reason": None, "stop_sequence": None}
            data = _event("message_start", message=empty)
        if message.finish_reason:
            self._end = _end(message)
        for kind, text in (("thinking", message.reasoning), ("text", message.text)):
            if text:
                data += self._within(kind)
                delta = {"type": f"{kind}_delta", kind: text}
                data += _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)
        return data

    def tail(self, usages: Iterable[pb.Usage]) -> bytes:
        """Return the last events."""
        (usage,) = usages
        data = self._within(self._blocks[-1] if self._blocks else "text") + self._close()
        return data + _event("message_delta", delta=self._end, usage=_usage(usage)) + _event("message_stop")

    def error_event(self, error: Json) -> bytes:
        """Return the event that an error ends a stream with."""
        return named_event("error", error)

    def whole(self, responses: list[pb.CompleteResponse]) -> Json:
        """Return the answer in one object."""
        (response,) = responses
        (choice,) = response.choices
        content = [_block("text", choice.text)] if choice.text or not choice.reasoning else []
        if choice.reasoning:
            content.insert(0, _block("thinking", choice.reasoning))
        return {**self._message(content, _usage(response.usage)), **_end(choice)}

    def _within(self, kind: str) -> bytes:
        """Return the events after which a block of this type is open."""
        if self._blocks and self._blocks[-1] == kind:
            return b""
        data = self._close() if self._blocks else b""
        self._blocks.append(kind)
        return data + _event("content_block_start", index=len(self._blocks) - 1, content_block=_block(kind, ""))

    def _close(self) -> bytes:
        return _event("content_block_stop", index=len(self._blocks) - 1)

    def _message(self, content: list[Json], usage: Json) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, "usage": usage}


def to_error(error: BatonError, names: Mapping[str, str]) -> Json:
    """Return the body of an error; its types are the same words as OpenAI's, but for some."""
    told = to_json(error, names)["error"]
    kind = _ERROR_TYPES.get(status_of(error), told["type"])
    return {"type": "error", "error": {"type": kind, "message": told["message"]}}


def _event(kind: str, **values: object) -> bytes:
    return named_event(kind, {"type": kind, **values})


def _block(kind: str, text: str) -> Json:
    """Return a block of content; clients look for the signature of a thinking one, which is another service's."""
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def _end(part: pb.GenerateResponse | pb.Choice) -> Json:
    reason = "max_tokens" if part.finish_reason == pb.FINISH_REASON_LENGTH else "end_turn"
    return {"stop_reason": "stop_sequence" if part.matched_stop else reason, "stop_sequence": part.matched_stop or None}


def _usage(usage: pb.Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.output_tokens,
    }
