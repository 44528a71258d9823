"""Read the input of a response, a list of items, into messages of baton.v1."""

from collections.abc import Mapping, MutableSequence
from typing import Any

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.fields.conversation import in_namespace, read_content
from gateway.http.fields.kinds import STRING
from gateway.http.fields.reading import read_as, read_list, read_object, without_nulls
from gateway.request.messages import MAX_MESSAGES

# Fields of an item of a response's input. Clients send an answer back with all its fields, and with what they parsed.
ITEM_ROLES = ("system", "developer", "user", "assistant")
ITEM_PARTS = ("input_text", "output_text")
ITEM_FIELDS = ("type", "role", "content", "id", "status", "phase")
CALL_FIELDS = ("type", "call_id", "name", "namespace", "arguments", "parsed_arguments", "id", "status")
OUTPUT_FIELDS = ("type", "call_id", "output", "id", "status")
_MAX_ITEMS = 4 * MAX_MESSAGES  # more than messages, as reasoning and calls are items too


def read_input(values: Mapping[str, Any], conversation: pb.Messages, names: dict[str, str]) -> None:
    """Read the input of a response into the conversation; add the client's names of messages to `names`. Raises
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
    reader = _InputReader(messages, names)
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise InvalidRequest(where, "must be an object with role and content")
        reader.add(where, without_nulls(item))
    reader.end()


class _InputReader:
    """Turn items into messages. An answer's reasoning, text and calls are several items, but one message."""

    def __init__(self, messages: MutableSequence[pb.Message], names: dict[str, str]):
        self._messages, self._names, self._num_before = messages, names, len(messages)
        self._thoughts = list[str]()  # reasoning of an answer whose other items have not come

    def add(self, where: str, item: Mapping[str, Any]) -> None:
        """Read the next item. Raises InvalidRequest."""
        kind = item.get("type", "message")
        if kind == "reasoning":
            if thought := read_content(f"{where}.content", item.get("content") or "", ("reasoning_text",)):
                self._thoughts.append(thought)
        elif kind == "function_call":
            self._add_call(where, item)
        else:
            self._add_message(where, _item_message(where, kind, item))

    def end(self) -> None:
        """End the input. Raises InvalidRequest if it has no message."""
        if len(self._messages) == self._num_before:
            raise InvalidRequest("input", "has no message")
        self._add_thoughts()

    def _add_call(self, where: str, item: Mapping[str, Any]) -> None:
        is_begun = len(self._messages) > self._num_before and self._messages[-1].role == "assistant"
        if self._thoughts or not is_begun:
            self._add_message(where, pb.Message(role="assistant"))
        calls = self._messages[-1].tool_calls
        here = f"messages.messages[{len(self._messages) - 1}].tool_calls[{len(calls)}]"
        calls.append(_item_call(where, item))
        self._names |= {here: where, f"{here}.id": f"{where}.call_id"}

    def _add_message(self, where: str, message: pb.Message) -> None:
        if message.role == "assistant":
            message.reasoning = "\n".join(self._thoughts)
            self._thoughts.clear()
        else:
            self._add_thoughts()
        self._messages.append(message)
        here = f"messages.messages[{len(self._messages) - 1}]"
        self._names |= {here: where, f"{here}.tool_call_id": f"{where}.call_id"}

    def _add_thoughts(self) -> None:
        """Add the message of an answer that ended in its reasoning, if one did."""
        if self._thoughts:
            self._messages.append(pb.Message(role="assistant", reasoning="\n".join(self._thoughts)))
            self._thoughts.clear()


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
        message = "is not supported here: nothing is stored; with store: false clients send items themselves"
        raise InvalidRequest(f"{where}.type", message)
    if kind != "message":
        message = "is not supported here: message, reasoning, function_call and function_call_output are"
        raise InvalidRequest(f"{where}.type", message)
    item = read_object(where, item, ITEM_FIELDS, keeps_empty_lists=True)
    if item.get("role") not in ITEM_ROLES:
        raise InvalidRequest(f"{where}.role", f"must be one of {', '.join(ITEM_ROLES)}")
    role = "system" if item["role"] == "developer" else item["role"]
    return pb.Message(role=role, content=read_content(f"{where}.content", item.get("content"), ITEM_PARTS))
