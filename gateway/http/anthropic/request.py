"""Read bodies of Anthropic's Messages API into messages of baton.v1."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.fields.body import ParsedBody, fill, new_id
from gateway.http.fields.constraints import read_constraint
from gateway.http.fields.conversation import (
    CHAT_NAMES,
    REDACTED_FIELDS,
    THOUGHT_FIELDS,
    TOKENIZE_NAMES,
    read_content,
    read_part,
    read_tool,
)
from gateway.http.fields.kinds import BOOLEAN, EFFORT, INTEGER, NUMBER, OBJECT_TEXT, STRING, STRINGS, TOP_K
from gateway.http.fields.reading import check_known, read_as, read_list, read_object, read_value
from gateway.http.fields.tables import Field
from gateway.http.wire.errors import ThreadRefused
from gateway.http.wire.signatures import hidden_in
from gateway.request.messages import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS, THINKING

# Fields of a document, and of each type of source that is text.
DOCUMENT = ("type", "source", "title", "context", "citations", "cache_control")
_SOURCES = {"text": ("type", "media_type", "data"), "content": ("type", "content")}
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
# Fields of each type of thinking; the size of a budget changes nothing.
THINKS: Mapping[str, tuple[str, ...]] = {
    "enabled": ("type", "budget_tokens", "display"),
    "adaptive": ("type", "display"),
    "disabled": ("type",),
}
DISPLAYS = ("summarized", "omitted")  # of reasoning: shown unchanged, or hidden
CHOICE_TYPES = {
    "auto": pb.TOOL_CHOICE_AUTO,
    "any": pb.TOOL_CHOICE_REQUIRED,
    "none": pb.TOOL_CHOICE_NONE,
    "tool": pb.TOOL_CHOICE_UNSPECIFIED,  # the named tool
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


def read_messages(values: Mapping[str, Any]) -> ParsedBody:
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
    return ParsedBody(f"msg_{request.request_id}", [request], names, stream)


def read_count_tokens(values: Mapping[str, Any]) -> tuple[pb.TokenizeRequest, dict[str, str]]:
    """Read the body of /v1/messages/count_tokens; return the request and the client's names of its fields. Raises
    InvalidRequest."""
    check_known(values, (), {}, (*_CONVERSATION, "model"))
    read_constraint(pb.GenerateRequest(), values, {})  # checked only, as a prompt does not have it
    names = {**TOKENIZE_NAMES, **_NAMES}
    model = read_value(values, "model", STRING, "")
    return pb.TokenizeRequest(model=model, messages=_conversation(values, names)), names


def _conversation(values: Mapping[str, Any], names: dict[str, str]) -> pb.Messages:
    """Read and return a conversation; add the client's names of messages and tools to `names`."""
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
        for each, own_names in _messages(f"messages[{index}]", message):
            if len(conversation.messages) >= MAX_MESSAGES:
                raise InvalidRequest("messages", f"has over {MAX_MESSAGES} messages, of which each result is one")
            here = f"messages.messages[{len(conversation.messages)}]"
            names |= {here + name: own for name, own in own_names.items()}
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
    fields = read_object("thinking", given, THINKS[kind])
    read_as("thinking.budget_tokens", INTEGER, fields.get("budget_tokens", 0))
    if fields.get("display", DISPLAYS[0]) not in DISPLAYS:
        raise InvalidRequest("thinking.display", f"must be {' or '.join(DISPLAYS)}")
    return dict.fromkeys(THINKING, kind != "disabled")


def _effort(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variable of the chat template that says how much the model reasons."""
    effort = values.get("output_config", {}).get("effort")
    return {} if effort is None else {"reasoning_effort": read_as("output_config.effort", EFFORT, effort)}


def _tools(values: Mapping[str, Any], names: dict[str, str]) -> pb.Messages:
    """Return a conversation that has tools and no messages; add the client's names of tools to `names`."""
    choice = read_object("tool_choice", values.get("tool_choice", {"type": "auto"}), _CHOICE)
    kind = read_as("tool_choice.type", STRING, choice.get("type"))
    if kind not in CHOICE_TYPES:
        raise InvalidRequest("tool_choice.type", f"must be one of {', '.join(CHOICE_TYPES)}")
    if (kind == "tool") != bool(name := read_as("tool_choice.name", STRING, choice.get("name", ""))):
        raise InvalidRequest("tool_choice.name", "is missing" if kind == "tool" else f"is given beside type {kind}")
    is_single = read_as(
        "tool_choice.disable_parallel_tool_use", BOOLEAN, choice.get("disable_parallel_tool_use", False)
    )
    conversation = pb.Messages(tool_choice=CHOICE_TYPES[kind], tool_name=name, parallel_tool_calls=not is_single)
    for index, tool in enumerate(read_list("tools", values.get("tools"), MAX_TOOLS)):
        where = f"tools[{index}]"
        if isinstance(tool, dict) and (tool.get("type") or "custom") != "custom":  # first: it has other fields
            raise InvalidRequest(f"{where}.type", "is not supported here: tools of one's own are")
        fields = read_object(where, tool, TOOL_FIELDS)
        # Streams send arguments as they are written in any case.
        read_as(f"{where}.eager_input_streaming", BOOLEAN, fields.get("eager_input_streaming", False))
        conversation.tools.append(read_tool(where, fields, "input_schema"))
        names[f"messages.{where}.parameters"] = f"{where}.input_schema"
    return conversation


def _messages(where: str, message: object) -> Iterator[tuple[pb.Message, dict[str, str]]]:
    """Yield one message, or several if it has results of tools, each with the client's names of its fields."""
    if not isinstance(message, dict):
        raise InvalidRequest(where, "must be an object with role and content")
    message = read_object(where, message, ("role", "content"), keeps_empty_lists=True)
    if not isinstance(role := message.get("role"), str) or role not in _BLOCKS:
        raise InvalidRequest(f"{where}.role", f"must be one of {', '.join(_BLOCKS)}")
    content, merged, names = message.get("content"), None, {"": where}
    if not isinstance(content, list) or not content:
        yield pb.Message(role=role, content=read_content(f"{where}.content", content)), names
        return
    for index, block in enumerate(content):
        here = f"{where}.content[{index}]"
        kind, fields = _fields(here, role, block)
        if kind == "redacted_thinking":  # encrypted by another service, which alone can read it
            continue
        if kind == "tool_result":
            if merged is not None:
                yield merged.message(), names
                merged = None
            yield _result(here, fields), {"": here, ".tool_call_id": f"{here}.tool_use_id"}
            continue
        merged = merged or _MergedBlocks(role)
        if kind == "tool_use":
            call = f".tool_calls[{len(merged.calls)}]"
            names |= {call: here, f"{call}.arguments": f"{here}.input"}
        merged.add(here, kind, fields)
    if merged is not None:
        yield merged.message(), names


class _MergedBlocks:
    """Merge blocks into one message. Texts are joined once, as a protobuf message keeps every value of a field."""

    def __init__(self, role: str):
        self.calls: list[pb.ToolCall] = []
        self._role = role
        self._texts, self._thoughts = list[str](), list[str]()

    def add(self, where: str, kind: str, fields: Mapping[str, Any]) -> None:
        """Add a block. Raises InvalidRequest."""
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
        """Return the message of all blocks."""
        content, reasoning = "".join(self._texts), "".join(self._thoughts)
        return pb.Message(role=self._role, content=content, reasoning=reasoning, tool_calls=self.calls)


def _fields(where: str, role: str, block: object) -> tuple[str, dict[str, Any]]:
    """Return the type of a block and its fields."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in _BLOCKS[role]:
        raise InvalidRequest(where, f"must be a block of type {' or '.join(_BLOCKS[role])}")
    return kind, read_object(where, block, _BLOCKS[role][kind])


def _call(where: str, fields: Mapping[str, Any]) -> pb.ToolCall:
    if fields.get("caller", _DIRECT) != _DIRECT:
        raise InvalidRequest(f"{where}.caller", "is not supported here")
    return pb.ToolCall(
        id=read_as(f"{where}.id", STRING, fields.get("id")),
        name=read_as(f"{where}.name", STRING, fields.get("name")),
        arguments=read_as(f"{where}.input", OBJECT_TEXT, fields.get("input")),
    )


def _result(where: str, fields: Mapping[str, Any]) -> pb.Message:
    """Return the message of a tool's result. `is_error` changes nothing, as its text says that the tool failed."""
    read_as(f"{where}.is_error", BOOLEAN, fields.get("is_error", False))
    return pb.Message(
        role="tool",
        content=read_blocks(f"{where}.content", fields.get("content", "")),
        tool_call_id=read_as(f"{where}.tool_use_id", STRING, fields.get("tool_use_id")),
    )


def read_block(where: str, block: object) -> str:
    """Return the text of a part, or of a document of Anthropic's: its title, its context and its text, each followed
    by a blank line."""
    if not isinstance(block, dict) or block.get("type") != "document":
        return read_part(where, block)
    fields = read_object(where, block, DOCUMENT)
    if read_object(f"{where}.citations", fields.get("citations", {}), ("enabled",)).get("enabled"):
        raise InvalidRequest(f"{where}.citations", "is not supported here: an answer cites nothing")
    place, source = f"{where}.source", fields.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(kind, str) or kind not in _SOURCES:
        raise InvalidRequest(place, f"must be of type {' or '.join(_SOURCES)}: a document is text here")
    name = _SOURCES[kind][-1]
    text = read_content(f"{place}.{name}", read_object(place, source, _SOURCES[kind]).get(name))
    before = [read_as(f"{where}.{each}", STRING, fields.get(each, "")) for each in ("title", "context")]
    return "".join(f"{each}\n\n" for each in (*before, text) if each)


def read_blocks(where: str, content: object) -> str:
    """Return the text of a content, whose parts may be documents."""
    if not isinstance(content, list):
        return read_content(where, content)
    return "".join(read_block(f"{where}[{index}]", block) for index, block in enumerate(content))


def _check_objects(values: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(values.get(name, {}), dict):
            raise InvalidRequest(name, "must be an object")
