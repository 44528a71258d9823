"""Check the messages of a conversation and its tools: roles, order, arguments. Raises InvalidRequest that names the
field."""

import json
import re
from collections.abc import Sequence

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.config.served_model import PRESETS, RequestLimits
from gateway.text.templates import ChatMessage, ChatOptions, ChatToolCall, Conversation, JsonObject

ROLES = ("system", "developer", "user", "assistant", "tool")
THINKING = ("enable_thinking", "thinking")  # template variables that turn a model's reasoning on or off
WITHOUT_THINKING = json.dumps(dict.fromkeys(THINKING, False))
MAX_MESSAGES = max(limits.messages for limits in PRESETS.values())
MAX_TOOLS = 128
MAX_CALLS = 128  # in one message
MAX_KWARGS_BYTES = 64 << 10  # of template variables, which do not count as part of the prompt
MAX_DEPTH = 64  # of arguments, parameters and template variables, which are walked by recursion
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_PAIR_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a pair, which text has only as an escape
_WHERE = "messages.messages"


def check_conversation(request: pb.Messages, limits: RequestLimits) -> Conversation:
    """Return the checked messages and their options. Raises InvalidRequest."""
    given = request.messages
    if not given:
        raise InvalidRequest(_WHERE, "is empty")
    if len(given) > limits.messages:
        raise InvalidRequest(_WHERE, f"has {len(given)} messages, at most {limits.messages} are allowed")
    called: set[str] = set()
    messages = tuple(_message(f"{_WHERE}[{index}]", message, called) for index, message in enumerate(given))
    if request.continue_final_message and (given[-1].role != "assistant" or given[-1].tool_calls):
        raise InvalidRequest(
            "messages.continue_final_message", "needs an assistant's message without tool_calls at the end"
        )
    kwargs, tools = _kwargs(request.chat_template_kwargs), _tools(request.tools)
    names, must_call = _choice(request, [tool["name"] for tool in tools])
    is_parallel = not request.tool_name and (not request.HasField("parallel_tool_calls") or request.parallel_tool_calls)
    options = ChatOptions(
        tools=tools,
        kwargs=kwargs,
        continues=request.continue_final_message,
        callable_tools=names,
        must_call=must_call,
        is_parallel=is_parallel,
        streams_arguments=request.stream_tool_arguments,
        strict_tools=tuple(tool.name for tool in request.tools if tool.strict and tool.name in names),
    )
    return Conversation(messages, options)


def _choice(request: pb.Messages, names: list[str]) -> tuple[tuple[str, ...], bool]:
    """Return the tools that the answer may call, and whether it must."""
    choice, name = request.tool_choice, request.tool_name
    if choice not in pb.ToolChoice.values():
        raise InvalidRequest("messages.tool_choice", "is not known here")
    if name and choice:
        raise InvalidRequest("messages.tool_name", "and tool_choice are given: one of them is needed")
    if name and name not in names:
        raise InvalidRequest("messages.tool_name", f"{name[:64]!r} is the name of no tool")
    must_call = bool(name) or choice == pb.TOOL_CHOICE_REQUIRED
    if must_call and not names:
        raise InvalidRequest("messages.tool_choice", "needs tools")
    if must_call and request.continue_final_message:
        raise InvalidRequest(
            "messages.continue_final_message", "cannot become a call: tool_choice must be auto or none"
        )
    if choice == pb.TOOL_CHOICE_NONE:
        return (), False
    return ((name,) if name else tuple(names)), must_call


def _message(where: str, message: pb.Message, called: set[str]) -> ChatMessage:
    """Return one checked message. `called`: ids of the calls in earlier messages; this message's ids are added."""
    role = message.role
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role", f"{'is unknown' if role else 'is empty'}: one of {', '.join(ROLES)}")
    for name, owner in (("tool_calls", "assistant"), ("reasoning", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and role != owner:
            raise InvalidRequest(f"{where}.{name}", f"is only for the role {owner}, not {role}")
    if message.tool_call_id and message.tool_call_id not in called:
        raise InvalidRequest(f"{where}.tool_call_id", f"{message.tool_call_id[:40]!r} is no call of an earlier message")
    calls = _calls(f"{where}.tool_calls", message.tool_calls, called)
    return ChatMessage(role, _content(where, message), calls, message.tool_call_id, message.reasoning, message.name)


def _content(where: str, message: pb.Message) -> str:
    if not message.parts:
        return message.content
    if message.content:
        raise InvalidRequest(f"{where}.parts", "and content are given: one of them is needed")
    for index, part in enumerate(message.parts):
        if part.WhichOneof("kind") is None:
            raise InvalidRequest(
                f"{where}.parts[{index}]", "is empty, or of a kind that is not known here: only text is"
            )
    return "".join(part.text for part in message.parts)


def _calls(where: str, calls: Sequence[pb.ToolCall], called: set[str]) -> tuple[ChatToolCall, ...]:
    if len(calls) > MAX_CALLS:
        raise InvalidRequest(where, f"has {len(calls)} calls, at most {MAX_CALLS} are allowed")
    found, ids = [], set[str]()  # a later message may use an id again: its results follow it
    for index, call in enumerate(calls):
        here = f"{where}[{index}]"
        if not call.name:
            raise InvalidRequest(f"{here}.name", "is empty")
        if call.id and call.id in ids:
            raise InvalidRequest(f"{here}.id", f"{call.id[:40]!r} is the id of another call in this message")
        ids.add(call.id)
        found.append(ChatToolCall(call.id, call.name, _object(f"{here}.arguments", call.arguments, is_models=True)))
    called |= ids
    return tuple(found)


def _kwargs(text: str) -> JsonObject:
    where = "messages.chat_template_kwargs"
    if (num_bytes := len(text.encode())) > MAX_KWARGS_BYTES:
        raise InvalidRequest(where, f"has {num_bytes} bytes, at most {MAX_KWARGS_BYTES} are allowed")
    return _object(where, text)


def _tools(tools: Sequence[pb.Tool]) -> tuple[JsonObject, ...]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("messages.tools", f"has {len(tools)} tools, at most {MAX_TOOLS} are allowed")
    found: dict[str, JsonObject] = {}
    for index, tool in enumerate(tools):
        where = f"messages.tools[{index}]"
        _check_name(f"{where}.name", tool.name)
        if tool.name in found:
            raise InvalidRequest(f"{where}.name", f"{tool.name!r} is the name of an earlier tool")
        parameters = _object(f"{where}.parameters", tool.parameters) or {"type": "object", "properties": {}}
        found[tool.name] = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return tuple(found.values())


def _check_name(where: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidRequest(where, f"must match {NAME.pattern}" if name else "is empty")


def _object(where: str, text: str, is_models: bool = False) -> JsonObject:
    """Return the JSON object in `text`, which is {} if `text` is empty. Raises InvalidRequest.

    `is_models`: a model wrote it. Then text that is no JSON is {} too, such as a call in which an answer ended, because
    templates that walk the arguments would fail on a text; and half of a surrogate pair becomes U+FFFD."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if is_models:
            return {}
        raise InvalidRequest(where, f"is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except (RecursionError, ValueError) as error:  # a number of thousands of digits is a ValueError
        why = "it is nested too deeply" if isinstance(error, RecursionError) else "it has a number that is too long"
        raise InvalidRequest(where, f"cannot be read: {why}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(where, "is not a JSON object")
    if not _is_shallow(value):
        raise InvalidRequest(where, f"is nested more than {MAX_DEPTH} levels deep")
    if _PAIR_ESCAPE.search(text) and _HALF_PAIR.search(written := json.dumps(value, ensure_ascii=False)):
        if not is_models:
            raise InvalidRequest(where, "has half of a surrogate pair, which is no text")
        value = json.loads(_HALF_PAIR.sub("\ufffd", written))
    return value


def _is_shallow(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [each for each in level if isinstance(each, dict | list)]
        if not inner:
            return True
        level = [below for each in inner for below in (each.values() if isinstance(each, dict) else each)]
    return False
