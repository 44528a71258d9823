"""Anthropic's Messages API in the same words of baton.v1: its requests and its answers."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.answers import split_parts
from gateway.http.constraints import read_constraint
from gateway.http.conversations import (
    DOCUMENT,
    REDACTED_FIELDS,
    THOUGHT_FIELDS,
    read_block,
    read_blocks,
    read_content,
    read_fields,
    read_list,
    read_tool,
)
from gateway.http.fields import (
    BOOLEAN,
    EFFORT,
    INTEGER,
    NUMBER,
    OBJECT_TEXT,
    STRING,
    STRINGS,
    TOP_K,
    Field,
    read_as,
    without_nulls,
)
from gateway.http.requests import CHAT_NAMES, TOKENIZE_NAMES, Asked, check_known, fill, new_id, read_value
from gateway.http.wire.errors import ThreadRefused
from gateway.http.wire.signatures import hidden_in, sign
from gateway.http.wire.writing import Json, named_event
from gateway.request.messages import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS, THINKING

MESSAGES = (
    Field("model", "model", STRING),
    Field("max_tokens", "stopping.max_tokens", INTEGER),
    Field("stop_sequences", "stopping.stop", STRINGS),
    Field("temperature", "sampling.temperature", NUMBER),
    Field("top_k", "sampling.top_k", TOP_K),
    Field("top_p", "sampling.top_p", NUMBER),
)
MESSAGES_NEUTRAL: Mapping[str, tuple] = {"service_tier": ("auto", "standard_only")}
_CONVERSATION = (
    "messages", "system", "cache_control", "tools", "tool_choice", "thinking", "output_config", "output_format",
    "context_management",
)  # fmt: skip
# Fields of each type of thinking; how much a budget asks for changes nothing.
THINKS: Mapping[str, tuple[str, ...]] = {
    "enabled": ("type", "budget_tokens", "display"),
    "adaptive": ("type", "display"),
    "disabled": ("type",),
}
DISPLAYS = ("summarized", "omitted")  # of reasoning: as it is, or not
TOOL_CHOICES = {
    "auto": pb.TOOL_CHOICE_AUTO,
    "any": pb.TOOL_CHOICE_REQUIRED,
    "none": pb.TOOL_CHOICE_NONE,
    "tool": pb.TOOL_CHOICE_UNSPECIFIED,  # the one that is named
}
# Fields of a tool, and of each type of block that a role may have.
TOOL_FIELDS = ("name", "description", "input_schema", "strict", "type", "cache_control", "eager_input_streaming")
_CHOICE = ("type", "name", "disable_parallel_tool_use")
_DIRECT = {"type": "direct"}
_TEXT = ("type", "text", "cache_control", "citations")
_RESULT = ("type", "tool_use_id", "content", "is_error", "cache_control")
_BLOCKS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "system": {"text": _TEXT},
    "user": {"text": _TEXT, "document": DOCUMENT, "tool_result": _RESULT},
    "assistant": {
        "text": _TEXT,
        "thinking": THOUGHT_FIELDS,
        "redacted_thinking": REDACTED_FIELDS,
        "tool_use": ("type", "id", "name", "input", "caller", "cache_control"),
    },
}
_NAMES = {"messages.tool_name": "tool_choice.name"}
_STOP_REASONS = {pb.FINISH_REASON_LENGTH: "max_tokens", pb.FINISH_REASON_TOOL_CALLS: "tool_use"}
_MOST = sys.float_info.max


def read_request(values: Mapping[str, Any]) -> Asked:
    """Read the body of /v1/messages. Raises InvalidRequest."""
    if "thread" in values:
        raise ThreadRefused
    check_known(values, MESSAGES, MESSAGES_NEUTRAL, (*_CONVERSATION, "stream", "metadata"))
    names = {**CHAT_NAMES, **_NAMES}
    request = pb.GenerateRequest(request_id=new_id(), messages=_conversation(values, names))
    fill(request, values, MESSAGES, names)
    if not request.stopping.HasField("max_tokens"):
        raise InvalidRequest("max_tokens", "is missing")
    _check_objects(values, "metadata")
    stream = read_value(values, "stream", BOOLEAN, False)
    return Asked(f"msg_{request.request_id}", [request], names, stream)


def read_count(values: Mapping[str, Any]) -> tuple[pb.TokenizeRequest, dict[str, str]]:
    """Read the body of /v1/messages/count_tokens; return the request and the words for its fields. Raises
    InvalidRequest."""
    check_known(values, (), {}, (*_CONVERSATION, "model"))
    read_constraint(pb.GenerateRequest(), values, {})  # the model is not told of it
    names = {**TOKENIZE_NAMES, **_NAMES}
    model = read_value(values, "model", STRING, "")
    return pb.TokenizeRequest(model=model, messages=_conversation(values, names)), names


def _conversation(values: Mapping[str, Any], names: dict[str, str]) -> pb.Messages:
    """Read a conversation, and its words for messages and tools into `names`."""
    given = values.get("messages")
    if not isinstance(given, list) or not given:
        raise InvalidRequest("messages", "is missing" if given is None else "must be a list of messages, and not empty")
    read_list("messages", given, MAX_MESSAGES)
    _check_objects(values, "cache_control", "context_management", "output_config")
    conversation = _tools(values, names)
    if kwargs := _thinking(values) | _effort(values):
        conversation.chat_template_kwargs = json.dumps(kwargs)
    if system := read_content("system", values["system"]) if "system" in values else "":
        conversation.messages.add(role="system", content=system)
    for index, message in enumerate(given):
        for each, words in _messages(f"messages[{index}]", message):
            if len(conversation.messages) >= MAX_MESSAGES:
                raise InvalidRequest("messages", f"has over {MAX_MESSAGES} messages, of which each result is one")
            here = f"messages.messages[{len(conversation.messages)}]"
            names |= {here + name: word for name, word in words.items()}
            conversation.messages.append(each)
    if given[-1]["role"] == "assistant":
        raise InvalidRequest(
            "messages", "the last one must be the user's: an answer that is begun is not continued here"
        )
    return conversation


def _thinking(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template that say whether the model reasons."""
    if "thinking" not in values:
        return {}
    given = values["thinking"]
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in THINKS:
        raise InvalidRequest("thinking", f"must be an object of type {' or '.join(THINKS)}")
    fields = read_fields("thinking", given, THINKS[kind])
    read_as("thinking.budget_tokens", INTEGER, fields.get("budget_tokens", 0))
    if fields.get("display", DISPLAYS[0]) not in DISPLAYS:
        raise InvalidRequest("thinking.display", f"must be {' or '.join(DISPLAYS)}")
    return dict.fromkeys(THINKING, kind != "disabled")


def _effort(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variable of the chat template that says how much."""
    effort = values.get("output_config", {}).get("effort")
    return {} if effort is None else {"reasoning_effort": read_as("output_config.effort", EFFORT, effort)}


def _tools(values: Mapping[str, Any], names: dict[str, str]) -> pb.Messages:
    """Return a conversation with its tools alone."""
    choice = read_fields("tool_choice", values.get("tool_choice", {"type": "auto"}), _CHOICE)
    kind = read_as("tool_choice.type", STRING, choice.get("type"))
    if kind not in TOOL_CHOICES:
        raise InvalidRequest("tool_choice.type", f"must be one of {', '.join(TOOL_CHOICES)}")
    if (kind == "tool") != bool(name := read_as("tool_choice.name", STRING, choice.get("name", ""))):
        raise InvalidRequest("tool_choice.name", "is missing" if kind == "tool" else f"is given beside type {kind}")
    is_single = read_as(
        "tool_choice.disable_parallel_tool_use", BOOLEAN, choice.get("disable_parallel_tool_use", False)
    )
    conversation = pb.Messages(tool_choice=TOOL_CHOICES[kind], tool_name=name, parallel_tool_calls=not is_single)
    for index, tool in enumerate(read_list("tools", values.get("tools"), MAX_TOOLS)):
        where = f"tools[{index}]"
        if isinstance(tool, dict) and (tool.get("type") or "custom") != "custom":  # first: it has other fields
            raise InvalidRequest(f"{where}.type", "is not supported here: tools of one's own are")
        fields = read_fields(where, tool, TOOL_FIELDS)
        # Every stream has arguments as they are written.
        read_as(f"{where}.eager_input_streaming", BOOLEAN, fields.get("eager_input_streaming", False))
        conversation.tools.append(read_tool(where, fields, "input_schema"))
        names[f"messages.{where}.parameters"] = f"{where}.input_schema"
    return conversation


def _messages(where: str, message: object) -> Iterator[tuple[pb.Message, dict[str, str]]]:
    """Yield the messages that one is, each with its words for fields: results of tools are messages of their own."""
    if not isinstance(message, dict):
        raise InvalidRequest(where, "must be an object with role and content")
    message = without_nulls(message)
    if unknown := message.keys() - {"role", "content"}:
        raise InvalidRequest(f"{where}.{min(unknown)[:80]}", "is not known here")
    if not isinstance(role := message.get("role"), str) or role not in _BLOCKS:
        raise InvalidRequest(f"{where}.role", f"must be one of {', '.join(_BLOCKS)}")
    content, said, words = message.get("content"), None, {"": where}
    if not isinstance(content, list) or not content:
        yield pb.Message(role=role, content=read_content(f"{where}.content", content)), words
        return
    for index, block in enumerate(content):
        here = f"{where}.content[{index}]"
        kind, fields = _fields(here, role, block)
        if kind == "redacted_thinking":  # another service's, which alone can read it
            continue
        if kind == "tool_result":
            if said is not None:
                yield said.message(), words
                said = None
            yield _result(here, fields), {"": here, ".tool_call_id": f"{here}.tool_use_id"}
            continue
        said = said or _Said(role)
        if kind == "tool_use":
            call = f".tool_calls[{len(said.calls)}]"
            words |= {call: here, f"{call}.arguments": f"{here}.input"}
        said.add(here, kind, fields)
    if said is not None:
        yield said.message(), words


class _Said:
    """Blocks that are one message. Texts are joined once: a message of protobuf keeps every value of a field."""

    def __init__(self, role: str):
        self.calls: list[pb.ToolCall] = []
        self._role = role
        self._texts, self._thoughts = list[str](), list[str]()

    def add(self, where: str, kind: str, fields: Mapping[str, Any]) -> None:
        if kind in ("text", "document"):
            self._texts.append(read_block(where, fields))
        elif kind == "thinking":
            shown = read_as(f"{where}.thinking", STRING, fields.get("thinking"))
            self._thoughts.append(shown or hidden_in(fields.get("signature")))
        elif len(self.calls) < MAX_CALLS:
            self.calls.append(_call(where, fields))
        else:
            raise InvalidRequest(where, f"is beyond the {MAX_CALLS} calls that a message may have")

    def message(self) -> pb.Message:
        content, reasoning = "".join(self._texts), "".join(self._thoughts)
        return pb.Message(role=self._role, content=content, reasoning=reasoning, tool_calls=self.calls)


def _fields(where: str, role: str, block: object) -> tuple[str, dict[str, Any]]:
    """Return the type of a block and its fields."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in _BLOCKS[role]:
        told = f"must be a block of type {' or '.join(_BLOCKS[role])}"
        raise InvalidRequest(where, told)
    return kind, read_fields(where, block, _BLOCKS[role][kind])


def _call(where: str, fields: Mapping[str, Any]) -> pb.ToolCall:
    if fields.get("caller", _DIRECT) != _DIRECT:
        raise InvalidRequest(f"{where}.caller", "is not supported here")
    return pb.ToolCall(
        id=read_as(f"{where}.id", STRING, fields.get("id")),
        name=read_as(f"{where}.name", STRING, fields.get("name")),
        arguments=read_as(f"{where}.input", OBJECT_TEXT, fields.get("input")),
    )


def _result(where: str, fields: Mapping[str, Any]) -> pb.Message:
    """Return what a tool answered; that it failed stands in its words."""
    read_as(f"{where}.is_error", BOOLEAN, fields.get("is_error", False))
    return pb.Message(
        role="tool",
        content=read_blocks(f"{where}.content", fields.get("content", "")),
        tool_call_id=read_as(f"{where}.tool_use_id", STRING, fields.get("tool_use_id")),
    )


def _check_objects(values: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(values.get(name, {}), dict):
            raise InvalidRequest(name, "must be an object")


class MessageForm:
    """The form of one answer."""

    def __init__(self, asked: Asked, model: str, values: Mapping[str, Any] = {}):
        """`values`: of the body, which may ask for the edits of the conversation, of which there are none, and that
        reasoning be not displayed."""
        self._id, self._model = asked.id, model
        self._edits: Json = {"context_management": {"applied_edits": []}} if "context_management" in values else {}
        self._hides = values.get("thinking", {}).get("display") == DISPLAYS[1]
        self._thoughts = list[str]()  # that are not displayed, of the block that is open
        self._has_begun = False
        self._blocks: list[str] = []  # types of those of a stream, the last one open
        self._end: Json = {}

    def chunk(self, prompt: int, message: pb.GenerateResponse) -> bytes:
        """Return the events for a message; there is one choice of one prompt."""
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
        """Return the events after which a block of this type is open."""
        if self._blocks and self._blocks[-1] == kind:
            return b""
        return self._begin(kind, _block(kind, ""))

    def _begin(self, kind: str, block: Json) -> bytes:
        """Return the events that close the block that is open, if one is, and open this one."""
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
    """Return a block of content; in a stream the signature of a thinking one comes at its end."""
    signature = {"signature": sign(text, hides) if text else ""} if kind == "thinking" else {}
    return {"type": kind, kind: "" if hides else text, **signature}


def _use(call: pb.ToolCall) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _input(call: pb.ToolCall) -> Json:
    """Return the arguments of a call. A number beyond all floats is the last of them: JSON has no infinity."""
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
