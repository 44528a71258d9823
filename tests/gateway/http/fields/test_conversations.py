"""Conversations in bodies: names, parts, documents, and how a model is to reason, in the words of each API."""

import json

import jsonschema
import pytest

from baton.service.errors import InvalidRequest
from gateway.http.anthropic.request import read_messages
from gateway.http.openai.conversations import CONVERSATION
from gateway.http.openai.requests import read_chat, read_tokenize
from gateway.http.openapi import document
from gateway.http.responses.request import INCLUDED, read_input_tokens, read_response
from gateway.http.wire.errors import rename

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_a_message_may_have_a_name(role):
    message = {"role": role, "content": "here"}
    (told,), (plain,) = (read_chat({"messages": [each]}).requests for each in ({**message, "name": "find"}, message))
    assert told.messages.messages[0].name == "find"
    told.messages.messages[0].name = ""
    assert told.messages == plain.messages


@pytest.mark.parametrize("kind", ["text", "message"])
def test_a_message_may_have_a_type(kind):
    """As lm-evaluation-harness sends each, up to 0.4.11."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]
    typed, plain = (
        read_chat({"messages": said}).requests[0] for said in ([{**each, "type": kind} for each in messages], messages)
    )
    assert typed.messages == plain.messages
    with pytest.raises(InvalidRequest, match=r"messages\[0\].type: must be \"text\" or \"message\""):
        read_chat({"messages": [{**messages[0], "type": "image"}]})


def test_a_system_message_of_anthropic_s_stands_in_its_place():
    said = [{"role": "user", "content": "hi"}, {"role": "system", "content": [{"type": "text", "text": "be short"}]}]
    (request,) = read_messages({"messages": said, "max_tokens": 1}).requests
    assert [(each.role, each.content) for each in request.messages.messages] == [("user", "hi"), ("system", "be short")]


THOUGHT = {"type": "thinking", "thinking": "Where?"}


@pytest.mark.parametrize(
    ("message", "content", "reasoning"),
    [
        ({"content": [THOUGHT, {"type": "text", "text": "I look."}]}, "I look.", "Where?"),
        ({"content": [THOUGHT | {"signature": "unsigned"}, {**THOUGHT, "thinking": " Here?"}]}, "", "Where? Here?"),
        ({"content": [{"type": "redacted_thinking", "data": "xyz"}, {"type": "text", "text": "I look."}]}, "I look.", ""),
        ({"content": [THOUGHT], "reasoning_content": "Where?"}, "", "Where?"),
    ],
    ids=str,
)  # fmt: skip
def test_reasoning_may_be_parts_of_an_answer(message, content, reasoning):
    """As LiteLLM's hosted_vllm makes them of the blocks of Anthropic's clients."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", **message}]
    said = read_chat({"messages": messages}).requests[0].messages.messages[1]
    assert (said.content, said.reasoning) == (content, reasoning)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [THOUGHT]}, "messages[0].content[0]"),
        ({"role": "assistant", "content": [THOUGHT], "reasoning": "Here?"}, "messages[0].reasoning"),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, "messages[0].content[0].thinking"),
        ({"role": "assistant", "content": [THOUGHT | {"text": "a"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "content": [THOUGHT, {"type": "image_url"}]}, "messages[0].content[1]"),
    ],
    ids=str,
)
def test_parts_of_reasoning_that_cannot_be_are_told_by_their_place(message, field):
    with pytest.raises(InvalidRequest) as caught:
        read_chat({"messages": [message]})
    assert caught.value.field == field


def valid(path, body):
    """Return the body, which is as the document has it."""
    schema = json.loads(json.dumps(document()))["paths"][path]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    jsonschema.validate(body, schema)
    return body


PARSED, ARGUMENTS = {"legs": 4}, '{"legs": 4}'


def test_what_clients_have_parsed_of_an_answer_may_come_back_in_a_chat():
    """As OpenAI's `parse` returns it, for Python and for Node."""
    function = {"name": "find", "arguments": ARGUMENTS, "parsed_arguments": PARSED}
    call = {"id": "c", "type": "function", "function": function}
    message = {"role": "assistant", "content": ARGUMENTS, "parsed": PARSED, "tool_calls": [call]}
    body = valid("/v1/chat/completions", {"messages": [*CHAT["messages"], message]})
    said = read_chat(body).requests[0].messages.messages[1]
    assert (said.content, said.tool_calls[0].arguments) == (ARGUMENTS, ARGUMENTS)


def test_what_clients_have_parsed_of_an_answer_may_come_back_in_a_response():
    message = {"role": "assistant", "content": [{"type": "output_text", "text": ARGUMENTS, "parsed": PARSED}]}
    call = {"call_id": "c", "name": "find", "arguments": ARGUMENTS, "parsed_arguments": PARSED}
    body = valid("/v1/responses", {"input": [{"type": "message", **message}, {"type": "function_call", **call}]})
    (said,) = read_response(body).requests[0].messages.messages
    assert (said.content, said.tool_calls[0].arguments) == (ARGUMENTS, ARGUMENTS)


def test_a_part_may_have_an_id():
    """As LangChain's `create_text_block` makes it."""
    part = {"type": "text", "text": "hi", "id": "lc_1", "index": 0}
    body = valid("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert read_chat(body).requests[0].messages == read_chat(CHAT).requests[0].messages


@pytest.mark.parametrize(
    "message",
    [{"role": "assistant"}, {"role": "assistant", "reasoning_content": "So."}, {"role": "tool", "content": None}],
)
def test_an_answer_and_a_result_without_content_say_nothing(message):
    """As programs in Go send what is empty."""
    asked = [{"messages": [*CHAT["messages"], each]} for each in (message, {**message, "content": ""})]
    absent, empty = (read_chat(valid("/v1/chat/completions", body)).requests[0].messages for body in asked)
    assert absent == empty and absent.messages[1].content == ""


def test_sources_of_a_search_that_nobody_makes_may_be_asked_for():
    """As the AI SDK does by itself beside the tool `web_search`."""
    tools = [{"type": "web_search"}, {"type": "function", "name": "find", "parameters": {}}]
    body = {"input": "hi", "tools": tools, "include": ["web_search_call.action.sources", "web_search_call.results"]}
    assert [tool.name for tool in read_response(valid("/v1/responses", body)).requests[0].messages.tools] == ["find"]


DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Foxes are red."}}


@pytest.mark.parametrize(
    ("document", "wanted"),
    [
        (DOCUMENT, "Foxes are red.\n\n"),
        (
            {**DOCUMENT, "title": "Foxes", "context": "From 1920.", "citations": {"enabled": False}},
            "Foxes\n\nFrom 1920.\n\nFoxes are red.\n\n",
        ),
        ({"type": "document", "source": {"type": "content", "content": "Foxes."}}, "Foxes.\n\n"),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Fox"}] * 2}},
            "FoxFox\n\n",
        ),
    ],
)
def test_a_document_of_anthropic_s_that_is_text_is_read(document, wanted):
    question = {"type": "text", "text": "What are they?"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [document, question]}
    for content, role in (([document, question], "user"), ([result], "tool")):
        (request,) = read_messages({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).requests
        assert [(each.role, each.content) for each in request.messages.messages] == [(role, wanted + "What are they?")]


def test_reasoning_that_another_service_alone_can_read_is_left_out():
    redacted = {"type": "redacted_thinking", "data": "EmwKAhgB"}
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [redacted, {"type": "text", "text": "ho"}]},
    ]
    said += [{"role": "assistant", "content": [redacted]}, {"role": "user", "content": "on"}]
    (request,) = read_messages({"messages": said, "max_tokens": 1}).requests
    assert [(each.role, each.content) for each in request.messages.messages] == [
        ("user", "hi"), ("assistant", "ho"), ("user", "on"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "signature", [None, 7, "EmwKAhgB", "unsigned", "unsigned:", "unsigned:!", "unsigned:/w=="], ids=str
)
def test_reasoning_that_was_not_displayed_elsewhere_is_none(signature):
    block = {"type": "thinking", "thinking": "", "signature": signature}
    said = [
        {"role": "assistant", "content": [block, {"type": "text", "text": "ho"}]},
        {"role": "user", "content": "on"},
    ]
    (request,) = read_messages({"messages": said, "max_tokens": 1}).requests
    assert (request.messages.messages[0].content, request.messages.messages[0].reasoning) == ("ho", "")


def test_template_variables_of_a_response_are_those_of_a_chat():
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    asked, chat = read_response({"input": "hi", **variables}), read_chat({**CHAT, **variables})
    told = asked.requests[0].messages.chat_template_kwargs
    assert told == chat.requests[0].messages.chat_template_kwargs == '{"enable_thinking": false}'
    assert rename("messages.chat_template_kwargs", asked.names) == "chat_template_kwargs"
    with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
        read_response({"input": "hi", "chat_template_kwargs": 7})


@pytest.mark.parametrize(
    ("effort", "own", "variables"),
    [
        ("none", {}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ("high", {}, {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}),
        ("low", {"enable_thinking": False, "a": 1}, {"reasoning_effort": "low", "enable_thinking": False, "thinking": True, "a": 1}),
    ],
)  # fmt: skip
def test_an_effort_to_reason_is_told_in_the_words_of_templates(effort, own, variables):
    chat = {**CHAT, "reasoning_effort": effort, "chat_template_kwargs": own}
    response = {"input": "hi", "reasoning": {"effort": effort, "summary": "auto"}, "chat_template_kwargs": own}
    for asked in (
        read_chat(chat).requests[0],
        read_tokenize({name: value for name, value in chat.items() if name in CONVERSATION}),
        read_response({**response, "include": [*INCLUDED]}).requests[0],
        read_input_tokens(response)[0],
    ):
        assert json.loads(asked.messages.chat_template_kwargs) == variables


ON, OFF = ({"enable_thinking": each, "thinking": each} for each in (True, False))


KEPT, CLEARED = ({"preserve_thinking": each, "clear_thinking": not each} for each in (True, False))


@pytest.mark.parametrize(
    ("said", "variables"),
    [
        ({"thinking": {"type": "enabled"}}, ON),
        ({"thinking": {"type": "adaptive"}}, ON),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, ON),
        ({"thinking": {"type": "enabled", "effort": "high", "keep": "all"}}, {"reasoning_effort": "high", **ON, **KEPT}),
        ({"thinking": {"type": "enabled", "keep": None}, "reasoning_effort": "max"}, {"reasoning_effort": "max", **ON}),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, ON | KEPT),
        ({"thinking": {"clear_thinking": True}}, CLEARED),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, {"reasoning_effort": "high", **OFF}),
        ({"enable_thinking": False}, OFF),
        ({"enable_thinking": True, "thinking_budget": 500, "preserve_thinking": True}, ON | KEPT),
        ({"preserve_thinking": False}, CLEARED),
        ({"reasoning": {"effort": "low", "summary": "auto", "exclude": False}}, {"reasoning_effort": "low", **ON}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", **OFF}),
        ({"reasoning": {"enabled": True}}, ON),
        ({"reasoning": {"enabled": False}}, OFF),
        ({"reasoning": {"max_tokens": 2000}}, ON),
        ({"reasoning": {"exclude": True}}, None),
        ({"reasoning": {}, "thinking": {}}, None),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}, "enable_thinking": False,
             "thinking": {"type": "disabled"}, "reasoning_effort": "none"},
            {"reasoning_effort": "none", **OFF},
        ),
        ({"chat_template_kwargs": {"thinking": False}, "enable_thinking": True}, ON | {"thinking": False}),
    ],
    ids=str,
)  # fmt: skip
def test_each_word_for_thinking_is_told_in_the_words_of_templates(said, variables):
    chat = {**CHAT, **said}
    for messages in (
        read_chat(chat).requests[0].messages,
        read_tokenize({name: value for name, value in chat.items() if name in CONVERSATION}).messages,
    ):
        assert (json.loads(messages.chat_template_kwargs) if messages.chat_template_kwargs else None) == variables


@pytest.mark.parametrize(
    ("said", "field", "why"),
    [
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, "thinking.type", "enable_thinking"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "thinking.type", "reasoning_effort"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort", "reasoning_effort"),
        ({"reasoning": {"effort": "none", "enabled": True}}, "reasoning.enabled", "reasoning.effort"),
        ({"preserve_thinking": True, "thinking": {"clear_thinking": True}}, "thinking.clear_thinking", "preserve_thinking"),
        ({"thinking": {"type": "on"}}, "thinking.type", "enabled, adaptive, disabled"),
        ({"thinking": {"type": []}}, "thinking.type", "enabled, adaptive, disabled"),
        ({"thinking": {"type": "enabled", "depth": 1}}, "thinking.depth", "not supported"),
        ({"thinking": {"keep": "last"}}, "thinking.keep", "must be all"),
        ({"thinking": {"budget_tokens": "few"}}, "thinking.budget_tokens", "integer"),
        ({"thinking": True}, "thinking", "an object"),
        ({"thinking_budget": "much"}, "thinking_budget", "integer"),
        ({"enable_thinking": "true"}, "enable_thinking", "true or false"),
        ({"reasoning": "low"}, "reasoning", "an object"),
        ({"reasoning": {"exclude": 1}}, "reasoning.exclude", "true or false"),
        ({"include_reasoning": 1}, "include_reasoning", "true or false"),
    ],
    ids=str,
)  # fmt: skip
def test_words_for_thinking_that_say_different_things_are_refused(said, field, why):
    with pytest.raises(InvalidRequest, match=why) as caught:
        read_chat({**CHAT, **said})
    assert caught.value.field == field


def test_reasoning_is_hidden_where_that_is_asked_for():
    chat = CHAT
    for said, hides in (
        ({}, False), ({"include_reasoning": True, "reasoning": {"exclude": False}}, False),
        ({"include_reasoning": False}, True), ({"include_reasoning": True, "reasoning": {"exclude": True}}, True),
    ):  # fmt: skip
        assert read_chat({**chat, **said}).hides_reasoning is hides
