"""Read conversations in OpenAI's form into messages of baton.v1."""

from collections.abc import Mapping, Sequence
from typing import Any

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.fields.conversation import (
    REDACTED_FIELDS,
    THOUGHT_FIELDS,
    TOOL_FIELDS,
    read_content,
    read_part,
    read_template_kwargs,
    read_tool,
    read_tool_choice,
)
from gateway.http.fields.kinds import BOOLEAN, OBJECT, STRING
from gateway.http.fields.reading import read_as, read_list, read_object
from gateway.http.fields.tables import REASONING_OPTIONS
from gateway.request.messages import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS

_OBJECTS = {
    parent: {option.name.rpartition(".")[2] for option in REASONING_OPTIONS if option.name.startswith(f"{parent}.")}
    for parent in ("thinking", "reasoning")
}
CONVERSATION = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "continue_final_message",
    "add_generation_prompt", *(option.name for option in REASONING_OPTIONS if "." not in option.name), *_OBJECTS,
)  # fmt: skip
_REASONING = ("reasoning", "reasoning_content")
# OpenAI's clients add `parsed`, and `parsed_arguments` of a call, to an answer, and send them back.
_MESSAGE = {"role", "name", "content", "parsed", "tool_calls", "tool_call_id", "type", *_REASONING}
TYPES = ("text", "message")  # the first is lm-evaluation-harness's, the other that of a response's items
_RESULT = {*_MESSAGE, "id", "extra"}  # Qwen-Agent's names for the id of the call, and for notes of its own
_MAY_BE_EMPTY = ("assistant", "tool")  # programs in Go leave out an empty text
# Fields of an answer's message, which OpenAI's agents for Node repeat in its text part.
REPEATED = ("role", "tool_calls", *_REASONING)


def read_conversation(values: Mapping[str, Any]) -> pb.Messages:
    """Read a conversation from a body. Raises InvalidRequest."""
    messages = values.get("messages")
    if not isinstance(messages, list):
        raise InvalidRequest("messages", "must be a list of messages" if "messages" in values else "is missing")
    if not read_list("messages", messages, MAX_MESSAGES):
        raise InvalidRequest("messages", "is empty")
    continues = read_as("continue_final_message", BOOLEAN, values.get("continue_final_message", False))
    begins = read_as("add_generation_prompt", BOOLEAN, values.get("add_generation_prompt", not continues))
    if begins == continues:
        raise InvalidRequest("add_generation_prompt", f"must be {not continues}".lower())
    choice, name = read_tool_choice(values.get("tool_choice", "auto"), is_wrapped=True)
    for parent, known in _OBJECTS.items():
        read_object(parent, values.get(parent, {}), known)
    return pb.Messages(
        tool_choice=choice,
        tool_name=name,
        parallel_tool_calls=read_as("parallel_tool_calls", BOOLEAN, values.get("parallel_tool_calls", True)),
        messages=[_message(f"messages[{index}]", message) for index, message in enumerate(messages)],
        tools=[
            _tool(f"tools[{index}]", tool)
            for index, tool in enumerate(read_list("tools", values.get("tools"), MAX_TOOLS))
        ],
        chat_template_kwargs=read_template_kwargs(values, REASONING_OPTIONS),
        continue_final_message=continues,
    )


def _message(where: str, message: object) -> pb.Message:
    is_result = isinstance(message, dict) and message.get("role") == "tool"
    fields = read_object(where, message, _RESULT if is_result else _MESSAGE)
    read_as(f"{where}.extra", OBJECT, fields.get("extra", {}))
    if fields.get("type", TYPES[0]) not in TYPES:
        raise InvalidRequest(f"{where}.type", 'must be "text" or "message"')
    own_id = read_as(f"{where}.id", STRING, fields.get("id", ""))
    role, content = fields.get("role"), fields.get("content")
    parts = content if role == "assistant" and isinstance(content, list) else []
    calls = read_list(f"{where}.tool_calls", fields.get("tool_calls"), MAX_CALLS)
    content = "" if content is None and role in _MAY_BE_EMPTY else content
    text, thought = _read_parts(f"{where}.content", parts) if parts else (read_content(f"{where}.content", content), "")
    return pb.Message(
        role=read_as(f"{where}.role", STRING, role),
        name=read_as(f"{where}.name", STRING, fields.get("name", "")),
        content=text,
        tool_calls=[_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)],
        tool_call_id=read_as(f"{where}.tool_call_id", STRING, fields.get("tool_call_id", own_id)),
        reasoning=_reasoning(where, fields, parts, thought),
    )


def _read_parts(where: str, parts: Sequence[object]) -> tuple[str, str]:
    """Return the text and the reasoning in the parts of an answer. LiteLLM sends reasoning in Anthropic's blocks;
    encrypted ones are ignored."""
    texts, thoughts = list[str](), list[str]()
    for index, part in enumerate(parts):
        here, kind = f"{where}[{index}]", part.get("type") if isinstance(part, dict) else None
        if kind == "thinking":
            fields = read_object(here, part, THOUGHT_FIELDS)
            thoughts.append(read_as(f"{here}.thinking", STRING, fields.get("thinking")))
        elif kind == "redacted_thinking":
            read_object(here, part, REDACTED_FIELDS)
        else:
            texts.append(read_part(here, part, others=REPEATED))
    return "".join(texts), "".join(thoughts)


def _reasoning(where: str, fields: Mapping[str, Any], parts: Sequence[object], thought: str) -> str:
    """Return the reasoning of a message, which fields of the message or of its parts may hold; `reasoning` is vLLM's
    newer name for reasoning_content. Raises InvalidRequest if they differ."""
    places = {where: fields} | {f"{where}.content[{i}]": part for i, part in enumerate(parts) if isinstance(part, dict)}
    found = ({thought} if thought else set()) | {
        read_as(f"{place}.{name}", STRING, each[name])
        for place, each in places.items()
        for name in _REASONING
        if each.get(name) is not None
    }
    if len(found) > 1:
        raise InvalidRequest(f"{where}.reasoning", "is not what reasoning_content or a thinking part is")
    return found.pop() if found else ""


def _call(where: str, call: object) -> pb.ToolCall:
    fields = read_object(where, call, {"id", "type", "function", "index"})
    function = read_object(f"{where}.function", fields.get("function"), {"name", "arguments", "parsed_arguments"})
    return pb.ToolCall(
        id=read_as(f"{where}.id", STRING, fields.get("id", "")),
        name=read_as(f"{where}.function.name", STRING, function.get("name")),
        arguments=read_as(f"{where}.function.arguments", STRING, function.get("arguments", "")),
    )


def _tool(where: str, tool: object) -> pb.Tool:
    fields = read_object(where, tool, {"type", "function"})
    if fields.get("type") != "function":
        raise InvalidRequest(f"{where}.type", 'must be "function"')
    function = read_object(f"{where}.function", fields.get("function"), TOOL_FIELDS)
    return read_tool(f"{where}.function", function, "parameters")
