"""Conversations in OpenAI's form, read into messages of baton.v1: messages, tools, and what goes with them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.fields import BOOLEAN, OBJECT, STRING, ValueKind, read_as

# Words for fields of baton.v1.Messages.
CONVERSATION_NAMES = {
    "messages": "messages",
    "messages.messages": "messages",
    **{f"messages.{name}": name for name in ("tools", "chat_template_kwargs", "continue_final_message", "tool_choice")},
    "messages.tool_name": "tool_choice.function.name",
}
CONVERSATION = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "continue_final_message",
    "add_generation_prompt",
)  # fmt: skip
_CHOICES = {"none": pb.TOOL_CHOICE_NONE, "auto": pb.TOOL_CHOICE_AUTO, "required": pb.TOOL_CHOICE_REQUIRED}
_CONTENT = ValueKind("a string, or a list of parts", {}, STRING.read)
_MESSAGE = {"role", "content", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"}
# Of a part: what was read is found again without being asked, and notes on an earlier answer are not read.
_PART = {"type", "text", "cache_control", "annotations", "logprobs"}
_TOOL = {"name", "description", "parameters", "strict"}


def read_conversation(values: Mapping[str, Any]) -> pb.Messages:
    """Read a conversation from a body. Raises InvalidRequest."""
    messages = values.get("messages")
    if not isinstance(messages, list):
        raise InvalidRequest("messages", "must be a list of messages" if "messages" in values else "is missing")
    if not messages:
        raise InvalidRequest("messages", "is empty")
    continues = read_as("continue_final_message", BOOLEAN, values.get("continue_final_message", False))
    begins = read_as("add_generation_prompt", BOOLEAN, values.get("add_generation_prompt", not continues))
    if begins == continues:
        raise InvalidRequest("add_generation_prompt", f"must be {not continues}".lower())
    kwargs = read_as("chat_template_kwargs", OBJECT, values.get("chat_template_kwargs", {}))
    choice, name = _tool_choice(values.get("tool_choice", "auto"))
    return pb.Messages(
        tool_choice=choice,
        tool_name=name,
        parallel_tool_calls=read_as("parallel_tool_calls", BOOLEAN, values.get("parallel_tool_calls", True)),
        messages=[_message(f"messages[{index}]", message) for index, message in enumerate(messages)],
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(_list("tools", values.get("tools")))],
        chat_template_kwargs=json.dumps(kwargs) if kwargs else "",
        continue_final_message=continues,
    )


def read_content(where: str, content: object, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a content: a string, or a list of parts of these types."""
    if not isinstance(content, list):
        return read_as(where, _CONTENT, content)
    texts = []
    for index, part in enumerate(content):
        given = {name for name, value in part.items() if value is not None} if isinstance(part, dict) else set()
        if "type" not in given or part["type"] not in kinds or given - _PART:
            told = f'only parts {{"type": "{kinds[0]}", "text": ...}} are supported here'
            raise InvalidRequest(f"{where}[{index}]", told)
        texts.append(read_as(f"{where}[{index}].text", STRING, part.get("text")))
    return "".join(texts)


def _message(where: str, message: object) -> pb.Message:
    """`reasoning` is vLLM's newer word for reasoning_content: one of them, or both with the same."""
    fields = _object(where, message, _MESSAGE)
    reasoning = {fields[name] for name in ("reasoning", "reasoning_content") if isinstance(fields.get(name), str)}
    if len(reasoning) > 1:
        raise InvalidRequest(f"{where}.reasoning", "is not what reasoning_content is")
    calls = _list(f"{where}.tool_calls", fields.get("tool_calls"))
    content = fields.get("content", "" if calls else None)
    return pb.Message(
        role=read_as(f"{where}.role", STRING, fields.get("role")),
        content=read_content(f"{where}.content", content),
        tool_calls=[_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)],
        tool_call_id=read_as(f"{where}.tool_call_id", STRING, fields.get("tool_call_id", "")),
        reasoning=reasoning.pop() if reasoning else "",
    )


def _call(where: str, call: object) -> pb.ToolCall:
    fields = _object(where, call, {"id", "type", "function", "index"})
    function = _object(f"{where}.function", fields.get("function"), {"name", "arguments"})
    return pb.ToolCall(
        id=read_as(f"{where}.id", STRING, fields.get("id", "")),
        name=read_as(f"{where}.function.name", STRING, function.get("name")),
        arguments=read_as(f"{where}.function.arguments", STRING, function.get("arguments", "")),
    )


def _tool(where: str, tool: object) -> pb.Tool:
    fields = _object(where, tool, {"type", "function"})
    if fields.get("type") != "function":
        raise InvalidRequest(f"{where}.type", 'must be "function"')
    function = _object(f"{where}.function", fields.get("function"), _TOOL)
    if function.get("strict", False) is not False:
        raise InvalidRequest(f"{where}.function.strict", "is not supported here: tool_choice required is always strict")
    parameters = read_as(f"{where}.function.parameters", OBJECT, function.get("parameters", {}))
    return pb.Tool(
        name=read_as(f"{where}.function.name", STRING, function.get("name")),
        description=read_as(f"{where}.function.description", STRING, function.get("description", "")),
        parameters=json.dumps(parameters) if parameters else "",
    )


def _tool_choice(choice: object) -> tuple[pb.ToolChoice, str]:
    """Return the choice, or the name of the one tool to call."""
    if isinstance(choice, str) and choice in _CHOICES:
        return _CHOICES[choice], ""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise InvalidRequest("tool_choice", f'must be {", ".join(_CHOICES)} or an object of type "function"')
    fields = _object("tool_choice", choice, {"type", "function"})
    function = _object("tool_choice.function", fields.get("function"), {"name"})
    name = read_as("tool_choice.function.name", STRING, function.get("name"))
    if not name:
        raise InvalidRequest("tool_choice.function.name", "is empty")
    return pb.TOOL_CHOICE_UNSPECIFIED, name


def _object(where: str, value: object, known: set[str]) -> dict[str, Any]:
    """Return the fields of an object that are not null, as clients write those that they leave out."""
    if not isinstance(value, dict):
        raise InvalidRequest(where, "must be an object" if value is not None else "is missing")
    fields = {name: each for name, each in value.items() if each is not None and each != []}
    if unknown := fields.keys() - known:
        raise InvalidRequest(f"{where}.{min(unknown)[:80]}", "is not supported here")
    return fields


def _list(where: str, value: object) -> list[Any]:
    if not isinstance(value, list | None):
        raise InvalidRequest(where, "must be a list")
    return value or []
