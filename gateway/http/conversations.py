"""Conversations in OpenAI's forms, read into messages of baton.v1: messages, the items of a response's input, tools, and what
goes with them."""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.fields import (
    BOOLEAN,
    OBJECT,
    OBJECT_TEXT,
    REASONING_OPTIONS,
    STRING,
    ReasoningOption,
    ValueKind,
    check_length,
    read_as,
    without_nulls,
)
from gateway.request.messages import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS, THINKING

# Words for fields of baton.v1.Messages.
CONVERSATION_NAMES = {
    "messages": "messages",
    "messages.messages": "messages",
    **{f"messages.{name}": name for name in ("tools", "chat_template_kwargs", "continue_final_message", "tool_choice")},
    "messages.tool_name": "tool_choice.function.name",
}
_OBJECTS = {
    parent: {option.name.rpartition(".")[2] for option in REASONING_OPTIONS if option.name.startswith(f"{parent}.")}
    for parent in ("thinking", "reasoning")
}
CONVERSATION = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "continue_final_message",
    "add_generation_prompt", *(option.name for option in REASONING_OPTIONS if "." not in option.name), *_OBJECTS,
)  # fmt: skip
_CHOICES = {"none": pb.TOOL_CHOICE_NONE, "auto": pb.TOOL_CHOICE_AUTO, "required": pb.TOOL_CHOICE_REQUIRED}
_CONTENT = ValueKind("a string, or a list of parts", {}, STRING.read)
_REASONING = ("reasoning", "reasoning_content")
_MESSAGE = {"role", "name", "content", "tool_calls", "tool_call_id", *_REASONING}
_RESULT = {*_MESSAGE, "id", "extra"}  # Qwen-Agent's words for the id of the call, and for notes of its own
# Of a part: what was read is found again without being asked, and notes on an earlier answer are not read.
_PART = {"type", "text", "cache_control", "annotations", "logprobs"}
# Of an answer's message, which OpenAI's agents for Node repeat in the part that is its text.
REPEATED = ("role", "tool_calls", *_REASONING)
THOUGHT_FIELDS, REDACTED_FIELDS = ("type", "thinking", "signature"), ("type", "data")
TOOL_FIELDS = ("name", "description", "parameters", "strict")
# Of an item of a response's input; an answer comes back with all of them.
ITEM_ROLES = ("system", "developer", "user", "assistant")
ITEM_PARTS = ("input_text", "output_text")
ITEM_FIELDS = ("type", "role", "content", "id", "status", "phase")
CALL_FIELDS = ("type", "call_id", "name", "namespace", "arguments", "id", "status")
OUTPUT_FIELDS = ("type", "call_id", "output", "id", "status")
# Of a document of Anthropic's, and of each source that is text.
DOCUMENT = ("type", "source", "title", "context", "citations", "cache_control")
_SOURCES = {"text": ("type", "media_type", "data"), "content": ("type", "content")}
_MAX_ITEMS = 4 * MAX_MESSAGES  # reasoning and calls are items beside messages


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
        read_fields(parent, values.get(parent, {}), known)
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


def read_content(where: str, content: object, kinds: Sequence[str] = ("text",), others: Collection[str] = ()) -> str:
    """Return the text of a content: a string, or a list of parts of these types. `others`: fields that a part may have, and
    that its text does not need."""
    if not isinstance(content, list):
        return read_as(where, _CONTENT, content)
    return "".join(read_part(f"{where}[{index}]", part, kinds, others) for index, part in enumerate(content))


def read_part(where: str, part: object, kinds: Sequence[str] = ("text",), others: Collection[str] = ()) -> str:
    """Return the text of a part of one of these types. `others`: fields that it may have, and that its text does not need."""
    given = {name for name, value in part.items() if value is not None} if isinstance(part, dict) else set()
    unknown = given.difference(_PART, others)
    if not isinstance(part, dict) or "type" not in given or part["type"] not in kinds or unknown:
        raise InvalidRequest(where, f'only parts {{"type": "{kinds[0]}", "text": ...}} are supported here')
    return read_as(f"{where}.text", STRING, part.get("text"))


def read_tool(where: str, fields: Mapping[str, Any], parameters: str) -> pb.Tool:
    """Return the tool with these fields; the one named `parameters` is its schema."""
    return pb.Tool(
        name=read_as(f"{where}.name", STRING, fields.get("name")),
        description=read_as(f"{where}.description", STRING, fields.get("description", "")),
        parameters=read_object_text(parameters, fields, f"{where}."),
        strict=read_as(f"{where}.strict", BOOLEAN, fields.get("strict", False)),
    )


def read_object_text(name: str, fields: Mapping[str, Any], where: str = "") -> str:
    """Return the object in a field as text, an empty one where it has nothing."""
    text = read_as(where + name, OBJECT_TEXT, fields.get(name, {}))
    return "" if text == "{}" else text


def read_template_kwargs(values: Mapping[str, Any], options: Sequence[ReasoningOption]) -> str:
    """Return the variables of the chat template as text: those that the client gives, and before them those that say in the
    words of templates how the model is to reason."""
    said = defaultdict[str, dict[str, Any]](dict)
    for option in options:
        if (value := _value_at(values, option.name)) is not None:
            said[option.about][option.name] = read_as(option.name, option.kind, value)
    variables = dict[str, Any]()
    # Any other effort is one of a model that reasons, unless that is turned off.
    thinks = _agreed({name: False for name, value in said["effort"].items() if value == "none"} | said["thinks"])
    if (effort := _agreed(said["effort"])) is not None:
        variables["reasoning_effort"], thinks = effort, thinks is not False
    if thinks is not None:
        variables |= dict.fromkeys(THINKING, thinks)
    if (keeps := _agreed(said["keeps"])) is not None:
        variables |= {"preserve_thinking": keeps, "clear_thinking": not keeps}  # Qwen's and Kimi's word, and GLM's
    if not variables:
        return read_object_text("chat_template_kwargs", values)
    return json.dumps(variables | read_as("chat_template_kwargs", OBJECT, values.get("chat_template_kwargs", {})))


def _value_at(values: Mapping[str, Any], name: str) -> object:
    """Return the value of a field, or of one of an object's; None: it is not given."""
    parent, _, own = name.rpartition(".")
    return values.get(parent, {}).get(own) if parent else values.get(own)


def _agreed(said: Mapping[str, Any]) -> Any:
    """Return what fields of these names say, None where there are none. Raises InvalidRequest where they say different
    things."""
    for name, value in said.items():
        first = next(iter(said))
        if value != said[first]:
            raise InvalidRequest(name, f"is not what {first} says")
    return next(iter(said.values()), None)


def read_tool_choice(choice: object, is_wrapped: bool) -> tuple[pb.ToolChoice, str]:
    """Return the choice, or the name of the one tool to call. `is_wrapped`: it stands in a field `function`."""
    if isinstance(choice, str) and choice in _CHOICES:
        return _CHOICES[choice], ""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise InvalidRequest("tool_choice", f'must be {", ".join(_CHOICES)} or an object of type "function"')
    own = ("function",) if is_wrapped else ("name", "namespace")
    where, fields = "tool_choice", read_fields("tool_choice", choice, ("type", *own))
    if is_wrapped:
        where, fields = f"{where}.function", read_fields(f"{where}.function", fields.get("function"), ("name",))
    name = read_as(f"{where}.name", STRING, fields.get("name"))
    if not name:
        raise InvalidRequest(f"{where}.name", "is empty")
    namespace = read_as(f"{where}.namespace", STRING, fields.get("namespace", ""))
    return pb.TOOL_CHOICE_UNSPECIFIED, in_namespace(namespace, name)


def read_fields(where: str, value: object, known: Collection[str]) -> dict[str, Any]:
    """Return the fields of an object that are not null, as clients write those that they leave out."""
    if not isinstance(value, dict):
        raise InvalidRequest(where, "must be an object" if value is not None else "is missing")
    fields = {name: each for name, each in value.items() if each is not None and each != []}
    if unknown := fields.keys() - set(known):
        raise InvalidRequest(f"{where}.{min(unknown)[:80]}", "is not supported here")
    return fields


def read_list(where: str, value: object, most: int) -> list[Any]:
    """Return a list; null is an empty one. Its length is looked at before what it holds."""
    if not isinstance(value, list | None):
        raise InvalidRequest(where, "must be a list")
    check_length(where, value, most)
    return value or []


def _message(where: str, message: object) -> pb.Message:
    is_result = isinstance(message, dict) and message.get("role") == "tool"
    fields = read_fields(where, message, _RESULT if is_result else _MESSAGE)
    read_as(f"{where}.extra", OBJECT, fields.get("extra", {}))
    own_id = read_as(f"{where}.id", STRING, fields.get("id", ""))
    role, content = fields.get("role"), fields.get("content")
    parts = content if role == "assistant" and isinstance(content, list) else []
    calls = read_list(f"{where}.tool_calls", fields.get("tool_calls"), MAX_CALLS)
    content = "" if content is None and calls else content
    text, thought = _said(f"{where}.content", parts) if parts else (read_content(f"{where}.content", content), "")
    return pb.Message(
        role=read_as(f"{where}.role", STRING, role),
        name=read_as(f"{where}.name", STRING, fields.get("name", "")),
        content=text,
        tool_calls=[_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)],
        tool_call_id=read_as(f"{where}.tool_call_id", STRING, fields.get("tool_call_id", own_id)),
        reasoning=_reasoning(where, fields, parts, thought),
    )


def _said(where: str, parts: Sequence[object]) -> tuple[str, str]:
    """Return the text and the reasoning in the parts of an answer, the latter in Anthropic's blocks, as LiteLLM sends them:
    those that are encrypted nobody here can read."""
    texts, thoughts = list[str](), list[str]()
    for index, part in enumerate(parts):
        here, kind = f"{where}[{index}]", part.get("type") if isinstance(part, dict) else None
        if kind == "thinking":
            fields = read_fields(here, part, THOUGHT_FIELDS)
            thoughts.append(read_as(f"{here}.thinking", STRING, fields.get("thinking")))
        elif kind == "redacted_thinking":
            read_fields(here, part, REDACTED_FIELDS)
        else:
            texts.append(read_part(here, part, others=REPEATED))
    return "".join(texts), "".join(thoughts)


def _reasoning(where: str, fields: Mapping[str, Any], parts: Sequence[object], thought: str) -> str:
    """Return what a message or its parts say of it. `reasoning` is vLLM's newer word for reasoning_content: one of them, or
    more with the same."""
    said = {where: fields} | {f"{where}.content[{i}]": part for i, part in enumerate(parts) if isinstance(part, dict)}
    found = ({thought} if thought else set()) | {
        read_as(f"{place}.{name}", STRING, each[name])
        for place, each in said.items()
        for name in _REASONING
        if each.get(name) is not None
    }
    if len(found) > 1:
        raise InvalidRequest(f"{where}.reasoning", "is not what reasoning_content or a thinking part is")
    return found.pop() if found else ""


def _call(where: str, call: object) -> pb.ToolCall:
    fields = read_fields(where, call, {"id", "type", "function", "index"})
    function = read_fields(f"{where}.function", fields.get("function"), {"name", "arguments"})
    return pb.ToolCall(
        id=read_as(f"{where}.id", STRING, fields.get("id", "")),
        name=read_as(f"{where}.function.name", STRING, function.get("name")),
        arguments=read_as(f"{where}.function.arguments", STRING, function.get("arguments", "")),
    )


def _tool(where: str, tool: object) -> pb.Tool:
    fields = read_fields(where, tool, {"type", "function"})
    if fields.get("type") != "function":
        raise InvalidRequest(f"{where}.type", 'must be "function"')
    function = read_fields(f"{where}.function", fields.get("function"), TOOL_FIELDS)
    return read_tool(f"{where}.function", function, "parameters")


def read_input(values: Mapping[str, Any], conversation: pb.Messages, names: dict[str, str]) -> None:
    """Read the input of a response into the conversation, and its words for messages into `names`. Raises
    InvalidRequest."""
    items, messages = values.get("input"), conversation.messages
    if items is None:
        raise InvalidRequest("input", "is missing")
    if isinstance(items, str):
        messages.add(role="user", content=read_as("input", STRING, items))
        return
    if not isinstance(items, list) or not items:
        raise InvalidRequest("input", "must be a string, or a list of messages that is not empty")
    read_list("input", items, _MAX_ITEMS)
    thoughts, num_before = list[str](), len(messages)
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise InvalidRequest(where, "must be an object with role and content")
        item = without_nulls(item)
        kind = item.get("type", "message")
        if kind == "reasoning":
            if thought := read_content(f"{where}.content", item.get("content") or "", ("reasoning_text",)):
                thoughts.append(thought)
            continue
        is_call = kind == "function_call"
        # An answer's reasoning, text and calls are items, and one message.
        if not (is_call and not thoughts and len(messages) > num_before and messages[-1].role == "assistant"):
            message = pb.Message(role="assistant") if is_call else _item_message(where, kind, item)
            if thoughts and message.role != "assistant":
                messages.add(role="assistant", reasoning="\n".join(thoughts))  # of an answer that ended in it
                thoughts.clear()
            messages.append(message)
            here = f"messages.messages[{len(messages) - 1}]"
            names |= {here: where, f"{here}.tool_call_id": f"{where}.call_id"}
        if is_call:
            here = f"messages.messages[{len(messages) - 1}].tool_calls[{len(messages[-1].tool_calls)}]"
            messages[-1].tool_calls.append(_item_call(where, item))
            names |= {here: where, f"{here}.id": f"{where}.call_id"}
        if messages[-1].role == "assistant" and thoughts:
            messages[-1].reasoning = "\n".join(thoughts)
            thoughts.clear()
    if len(messages) == num_before:
        raise InvalidRequest("input", "has no message")
    if thoughts:
        messages.add(role="assistant", reasoning="\n".join(thoughts))


def in_namespace(namespace: str, name: str) -> str:
    """Return the name that the model knows a function by: templates have no namespaces."""
    return f"{namespace}__{name}" if namespace and name else name


def _item_call(where: str, item: Mapping[str, Any]) -> pb.ToolCall:
    fields = read_fields(where, item, CALL_FIELDS)
    return pb.ToolCall(
        id=read_as(f"{where}.call_id", STRING, fields.get("call_id")),
        name=in_namespace(
            read_as(f"{where}.namespace", STRING, fields.get("namespace", "")),
            read_as(f"{where}.name", STRING, fields.get("name")),
        ),
        arguments=read_as(f"{where}.arguments", STRING, fields.get("arguments")),
    )


def _item_message(where: str, kind: object, item: Mapping[str, Any]) -> pb.Message:
    if kind == "function_call_output":
        fields = read_fields(where, item, OUTPUT_FIELDS)
        content = read_content(f"{where}.output", fields.get("output", ""), ITEM_PARTS)
        call_id = read_as(f"{where}.call_id", STRING, fields.get("call_id"))
        return pb.Message(role="tool", content=content, tool_call_id=call_id)
    if kind == "item_reference":
        told = "is not supported here: nothing is stored; with store: false clients send items themselves"
        raise InvalidRequest(f"{where}.type", told)
    if kind != "message":
        told = "is not supported here: message, reasoning, function_call and function_call_output are"
        raise InvalidRequest(f"{where}.type", told)
    for name in item:
        if name not in ITEM_FIELDS:
            raise InvalidRequest(f"{where}.{name[:80]}", "is not known here")
    if item.get("role") not in ITEM_ROLES:
        raise InvalidRequest(f"{where}.role", f"must be one of {', '.join(ITEM_ROLES)}")
    role = "system" if item["role"] == "developer" else item["role"]
    return pb.Message(role=role, content=read_content(f"{where}.content", item.get("content"), ITEM_PARTS))


def read_block(where: str, block: object) -> str:
    """Return the text of a part, or of a document of Anthropic's: its title, what is said of it and its own text, each with a
    blank line behind it."""
    if not isinstance(block, dict) or block.get("type") != "document":
        return read_part(where, block)
    fields = read_fields(where, block, DOCUMENT)
    if read_fields(f"{where}.citations", fields.get("citations", {}), ("enabled",)).get("enabled"):
        raise InvalidRequest(f"{where}.citations", "is not supported here: an answer cites nothing")
    place, source = f"{where}.source", fields.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(kind, str) or kind not in _SOURCES:
        raise InvalidRequest(place, f"must be of type {' or '.join(_SOURCES)}: a document is text here")
    name = _SOURCES[kind][-1]
    text = read_content(f"{place}.{name}", read_fields(place, source, _SOURCES[kind]).get(name))
    before = [read_as(f"{where}.{each}", STRING, fields.get(each, "")) for each in ("title", "context")]
    return "".join(f"{each}\n\n" for each in (*before, text) if each)


def read_blocks(where: str, content: object) -> str:
    """As read_content, of parts and documents."""
    if not isinstance(content, list):
        return read_content(where, content)
    return "".join(read_block(f"{where}[{index}]", block) for index, block in enumerate(content))
