"""The input of a response: items, read into messages of baton.v1."""

from collections.abc import Mapping
from typing import Any

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.fields.conversation import in_namespace, read_content
from gateway.http.fields.kinds import STRING
from gateway.http.fields.reading import read_as, read_list, read_object, without_nulls
from gateway.request.messages import MAX_MESSAGES

# Of an item of a response's input; an answer comes back with all of them.
ITEM_ROLES = ("system", "developer", "user", "assistant")
ITEM_PARTS = ("input_text", "output_text")
ITEM_FIELDS = ("type", "role", "content", "id", "status", "phase")
CALL_FIELDS = ("type", "call_id", "name", "namespace", "arguments", "id", "status")
OUTPUT_FIELDS = ("type", "call_id", "output", "id", "status")
_MAX_ITEMS = 4 * MAX_MESSAGES  # reasoning and calls are items beside messages


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


def _item_call(where: str, item: Mapping[str, Any]) -> pb.ToolCall:
    fields = read_object(where, item, CALL_FIELDS)
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
        fields = read_object(where, item, OUTPUT_FIELDS)
        content = read_content(f"{where}.output", fields.get("output", ""), ITEM_PARTS)
        call_id = read_as(f"{where}.call_id", STRING, fields.get("call_id"))
        return pb.Message(role="tool", content=content, tool_call_id=call_id)
    if kind == "item_reference":
        told = "is not supported here: nothing is stored; with store: false clients send items themselves"
        raise InvalidRequest(f"{where}.type", told)
    if kind != "message":
        told = "is not supported here: message, reasoning, function_call and function_call_output are"
        raise InvalidRequest(f"{where}.type", told)
    item = read_object(where, item, ITEM_FIELDS, keeps_empty_lists=True)
    if item.get("role") not in ITEM_ROLES:
        raise InvalidRequest(f"{where}.role", f"must be one of {', '.join(ITEM_ROLES)}")
    role = "system" if item["role"] == "developer" else item["role"]
    return pb.Message(role=role, content=read_content(f"{where}.content", item.get("content"), ITEM_PARTS))
