"""Read parts of conversations that all APIs share: contents, tools, and variables of the chat template."""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.fields.kinds import BOOLEAN, OBJECT, OBJECT_TEXT, STRING, ValueKind
from gateway.http.fields.reading import read_as, read_object
from gateway.http.fields.tables import ReasoningOption
from gateway.request.messages import THINKING

# The client's names for fields of baton.v1.Messages.
CONVERSATION_NAMES = {
    "messages": "messages",
    "messages.messages": "messages",
    **{f"messages.{name}": name for name in ("tools", "chat_template_kwargs", "continue_final_message", "tool_choice")},
    "messages.tool_name": "tool_choice.function.name",
}
CHAT_NAMES = {**CONVERSATION_NAMES, "input": "messages"}
TOKENIZE_NAMES = {**CONVERSATION_NAMES, "text": "prompt", "input": "prompt"}
TOOL_CHOICES = {"none": pb.TOOL_CHOICE_NONE, "auto": pb.TOOL_CHOICE_AUTO, "required": pb.TOOL_CHOICE_REQUIRED}
_CONTENT = ValueKind("a string, or a list of parts", {}, STRING.read)
# Fields of a part. Prefixes are cached without cache_control; notes on an earlier answer, or of LangChain, are
# ignored.
_PART = {"type", "text", "cache_control", "annotations", "logprobs", "parsed", "id", "index"}
THOUGHT_FIELDS, REDACTED_FIELDS = ("type", "thinking", "signature"), ("type", "data")
TOOL_FIELDS = ("name", "description", "parameters", "strict")


def read_content(where: str, content: object, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a content: a string, or a list of parts of these types."""
    if not isinstance(content, list):
        return read_as(where, _CONTENT, content)
    return "".join(read_part(f"{where}[{index}]", part, kinds) for index, part in enumerate(content))


def read_part(where: str, part: object, kinds: Sequence[str] = ("text",), others: Collection[str] = ()) -> str:
    """Return the text of a part of one of these types. `others`: more fields that it may have, which are ignored."""
    if not isinstance(part, dict) or part.get("type") not in kinds:
        raise InvalidRequest(where, f'only parts {{"type": "{kinds[0]}", "text": ...}} are supported here')
    if unknown := {name for name in part.keys() - _PART if name not in others and part[name] is not None}:
        raise InvalidRequest(f"{where}.{min(unknown)[:80]}", "is not supported here")
    return read_as(f"{where}.text", STRING, part.get("text"))


def read_tool(where: str, fields: Mapping[str, Any], parameters: str) -> pb.Tool:
    """Return the tool with these fields. `parameters`: the name of the field with its schema."""
    return pb.Tool(
        name=read_as(f"{where}.name", STRING, fields.get("name")),
        description=read_as(f"{where}.description", STRING, fields.get("description", "")),
        parameters=read_object_text(parameters, fields, f"{where}."),
        strict=read_as(f"{where}.strict", BOOLEAN, fields.get("strict", False)),
    )


def read_object_text(name: str, fields: Mapping[str, Any], where: str = "") -> str:
    """Return the object in a field as JSON, "" if it is empty or missing."""
    text = read_as(where + name, OBJECT_TEXT, fields.get(name, {}))
    return "" if text == "{}" else text


def read_template_kwargs(values: Mapping[str, Any], options: Sequence[ReasoningOption]) -> str:
    """Return the variables of the chat template as JSON: first those that stand for the request's reasoning options,
    then those that the client gives itself."""
    given = defaultdict[str, dict[str, Any]](dict)
    for option in options:
        if (value := _value_at(values, option.name)) is not None:
            given[option.about][option.name] = read_as(option.name, option.kind, value)
    variables = dict[str, Any]()
    # An effort other than none turns reasoning on, unless another option turns it off.
    thinks = _agreed({name: False for name, value in given["effort"].items() if value == "none"} | given["thinks"])
    if (effort := _agreed(given["effort"])) is not None:
        variables["reasoning_effort"], thinks = effort, thinks is not False
    if thinks is not None:
        variables |= dict.fromkeys(THINKING, thinks)
    if (keeps := _agreed(given["keeps"])) is not None:
        variables |= {"preserve_thinking": keeps, "clear_thinking": not keeps}  # the names of Qwen and Kimi, and of GLM
    if not variables:
        return read_object_text("chat_template_kwargs", values)
    return json.dumps(variables | read_as("chat_template_kwargs", OBJECT, values.get("chat_template_kwargs", {})))


def _value_at(values: Mapping[str, Any], name: str) -> object:
    """Return the value of a field, "NAME" or "OBJECT.NAME"; None if it is not given."""
    parent, _, own = name.rpartition(".")
    return values.get(parent, {}).get(own) if parent else values.get(own)


def _agreed(given: Mapping[str, Any]) -> Any:
    """Return the value that these fields share, None if there are none. Raises InvalidRequest if they differ."""
    for name, value in given.items():
        first = next(iter(given))
        if value != given[first]:
            raise InvalidRequest(name, f"is not what {first} says")
    return next(iter(given.values()), None)


def read_tool_choice(choice: object, is_wrapped: bool) -> tuple[pb.ToolChoice, str]:
    """Return the choice, and the name of the tool to call, if it names one. `is_wrapped`: the name is in a field
    `function`."""
    if isinstance(choice, str) and choice in TOOL_CHOICES:
        return TOOL_CHOICES[choice], ""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise InvalidRequest("tool_choice", f'must be {", ".join(TOOL_CHOICES)} or an object of type "function"')
    own = ("function",) if is_wrapped else ("name", "namespace")
    where, fields = "tool_choice", read_object("tool_choice", choice, ("type", *own))
    if is_wrapped:
        where, fields = f"{where}.function", read_object(f"{where}.function", fields.get("function"), ("name",))
    name = read_as(f"{where}.name", STRING, fields.get("name"))
    if not name:
        raise InvalidRequest(f"{where}.name", "is empty")
    namespace = read_as(f"{where}.namespace", STRING, fields.get("namespace", ""))
    return pb.TOOL_CHOICE_UNSPECIFIED, in_namespace(namespace, name)


def in_namespace(namespace: str, name: str) -> str:
    """Return the function's name for the model, with its namespace before it, as templates have no namespaces."""
    return f"{namespace}__{name}" if namespace and name else name
