"""Read bodies of OpenAI's Responses API into messages of baton.v1. Nothing is stored, so each request has the whole
conversation."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.fields.body import ParsedBody, fill, new_id
from gateway.http.fields.constraints import read_constraint
from gateway.http.fields.conversation import (
    TOOL_FIELDS,
    in_namespace,
    read_template_kwargs,
    read_tool,
    read_tool_choice,
)
from gateway.http.fields.kinds import BOOLEAN, METADATA, STRING, SUMMARY
from gateway.http.fields.reading import (
    check_known,
    check_notes,
    read_as,
    read_list,
    read_object,
    read_value,
)
from gateway.http.fields.tables import EFFORT_OF_RESPONSE, INPUT_NEUTRAL, NOTES, RESPONSE, RESPONSE_NEUTRAL
from gateway.http.responses.items import read_input
from gateway.http.wire.encoding import Json
from gateway.http.wire.errors import BadCall
from gateway.request.messages import MAX_TOOLS

LOGPROBS = "message.output_text.logprobs"
# The others change nothing: reasoning is returned as plain text, and no search is made.
INCLUDED = (LOGPROBS, "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results")
SUMMARIES = ("summary", "generate_summary")
ELSEWHERE = ("web_search", "image_generation")  # how the types of tools begin that the service runs, not the client
_NAMES = {
    "messages.messages": "input",
    "messages": "input",
    "input": "input",
    "messages.tools": "tools",
    "messages.tool_choice": "tool_choice",
    "messages.tool_name": "tool_choice.name",
    "messages.chat_template_kwargs": "chat_template_kwargs",
}
TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls")
_CONVERSATION = ("input", "instructions", "text", "chat_template_kwargs", "reasoning", *TOOL_OPTIONS)


def read_response(values: Mapping[str, Any]) -> ParsedBody:
    """Read the body of /v1/responses. Raises InvalidRequest."""
    _check_previous(values)
    others = (*_CONVERSATION, "include", "stream", "stream_options", "client_metadata", *NOTES)
    check_known(values, RESPONSE, RESPONSE_NEUTRAL, others)
    names = dict(_NAMES)
    request = pb.GenerateRequest(messages=_conversation(values, names))
    fill(request, values, RESPONSE, names)
    if _has_logprobs(values):
        request.sampling.logprobs = request.sampling.logprobs  # sets the field even if it is 0
    elif "top_logprobs" in values:
        raise InvalidRequest("top_logprobs", f'needs include: ["{LOGPROBS}"]')
    check_notes(values)
    read_value(values, "client_metadata", METADATA, {})
    stream = read_value(values, "stream", BOOLEAN, False)
    read_object("stream_options", values.get("stream_options", {}), ("include_obfuscation",), keeps_empty_lists=True)
    request.request_id = request.request_id or new_id()
    return ParsedBody(f"resp_{request.request_id}", [request], names, stream)


def read_input_tokens(values: Mapping[str, Any]) -> tuple[pb.TokenizeRequest, dict[str, str]]:
    """Read the body of /v1/responses/input_tokens; return the request and the client's names of its fields. Raises
    InvalidRequest."""
    _check_previous(values)
    check_known(values, (), INPUT_NEUTRAL, (*_CONVERSATION, "model"))
    read_constraint(pb.GenerateRequest(), values, {})  # checked only, as a prompt does not have it
    names = dict(_NAMES)
    model = read_value(values, "model", STRING, "")
    return pb.TokenizeRequest(model=model, messages=_conversation(values, names)), names


def _check_previous(values: Mapping[str, Any]) -> None:
    """Raise BadCall for a stored response; its reason tells clients to send the whole conversation."""
    if "previous_response_id" in values:
        message = "is not known here: nothing is stored, so input has the whole conversation"
        raise BadCall("previous_response_id", message, "PREVIOUS_RESPONSE_NOT_FOUND")


def _conversation(values: Mapping[str, Any], names: dict[str, str]) -> pb.Messages:
    """Read and return a conversation; add the client's names of messages and tools to `names`."""
    conversation = _tools(values, names)
    reasoning = read_object("reasoning", values.get("reasoning", {}), ("effort", *SUMMARIES), keeps_empty_lists=True)
    for name, value in reasoning.items():
        if name in SUMMARIES:
            read_as(f"reasoning.{name}", SUMMARY, value)
    conversation.chat_template_kwargs = read_template_kwargs(values, EFFORT_OF_RESPONSE)
    if "instructions" in values:
        conversation.messages.add(role="system", content=read_value(values, "instructions", STRING))
    read_input(values, conversation, names)
    return conversation


def _tools(values: Mapping[str, Any], names: dict[str, str]) -> pb.Messages:
    """Return a conversation that has tools and no messages; add the client's names of tools to `names`."""
    choice, name = read_tool_choice(values.get("tool_choice", "auto"), is_wrapped=False)
    parallel = read_value(values, "parallel_tool_calls", BOOLEAN, True)
    conversation = pb.Messages(tool_choice=choice, tool_name=name, parallel_tool_calls=parallel)
    given = read_list("tools", values.get("tools"), MAX_TOOLS)
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if _kind(tool) == "namespace":
            _namespace(where, tool, conversation, names)
        elif not is_elsewhere(tool):
            _function(where, tool, conversation, names)
    if not conversation.tools and any(map(is_elsewhere, given)):
        raise InvalidRequest("tools[0].type", "is not supported here: function and namespace are")
    return conversation


def _kind(tool: object) -> object:
    return tool.get("type") if isinstance(tool, dict) else None


def is_elsewhere(tool: object) -> bool:
    """Return whether the service would have to run the tool. Agents offer such tools to any service beside their own;
    they are left out of the prompt."""
    kind = _kind(tool)
    return isinstance(kind, str) and kind.startswith(ELSEWHERE)


def _namespace(where: str, namespace: Mapping[str, Any], conversation: pb.Messages, names: dict[str, str]) -> None:
    """Read the functions of a namespace. Each gets its name as a prefix; its description goes before that of the first
    function."""
    fields = read_object(where, namespace, ("type", "name", "description", "tools"))
    name, num_before = read_as(f"{where}.name", STRING, fields.get("name")), len(conversation.tools)
    for index, tool in enumerate(read_list(f"{where}.tools", fields.get("tools"), MAX_TOOLS - num_before)):
        _function(f"{where}.tools[{index}]", tool, conversation, names, name)
    if description := read_as(f"{where}.description", STRING, fields.get("description", "")):
        for first in conversation.tools[num_before : num_before + 1]:
            first.description = "\n\n".join(filter(None, (description, first.description)))


def _function(where: str, tool: object, conversation: pb.Messages, names: dict[str, str], namespace: str = "") -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidRequest(f"{where}.type", 'must be "function"')
    fields = read_object(where, tool, ("type", *TOOL_FIELDS))
    names[f"messages.tools[{len(conversation.tools)}]"] = where
    conversation.tools.append(read_tool(where, fields, "parameters"))
    conversation.tools[-1].name = in_namespace(namespace, conversation.tools[-1].name)


def _has_logprobs(values: Mapping[str, Any]) -> bool:
    include = values.get("include", [])
    if not isinstance(include, list):
        raise InvalidRequest("include", "must be a list")
    for index, each in enumerate(include):
        if each not in INCLUDED:
            raise InvalidRequest(f"include[{index}]", f"is not supported here; {' and '.join(INCLUDED)} are")
    return LOGPROBS in include


def names_in_namespaces(tools: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Json]]:
    """Yield the name of each function in a namespace, as the model knows it, and its name and namespace for clients."""
    for each in tools:
        if _kind(each) == "namespace":
            for function in each.get("tools") or ():
                own = {"name": function["name"], "namespace": each["name"]}
                yield in_namespace(each["name"], function["name"]), own
