"""Bodies as agents send them: Claude Code 2.1 to /v1/messages, Codex 0.171 to /v1/responses, OpenAI's agents 0.20 for
Node and Qwen-Agent 0.0.34 to /v1/chat/completions."""

import json

import anthropic
import openai
import pytest

from baton.service.errors import InvalidRequest
from gateway.http.anthropic.request import read_count_tokens, read_messages
from gateway.http.openai.requests import read_chat
from gateway.http.responses.request import read_response
from tests.gateway.http.clients.anthropic_calls import anthropic_client
from tests.gateway.http.conftest import openai_client

USER = {"role": "user", "content": "Fix it"}
CLAUDE_CODE = {
    "model": "fake",
    "max_tokens": 400,
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Fix it", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        },
        {"role": "system", "content": "There are agents."},
    ],
    "system": [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "Read", "description": "Reads.", "input_schema": {"type": "object", "properties": {}}}],
    "metadata": {"user_id": '{"device_id":"5f25"}'},
    "extra_body": {
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    },
}


async def test_a_request_of_claude_code_is_answered(saying):
    async with saying("<think>\nI look.\n</think>\n\nDone.", http="127.0.0.1:0") as c, anthropic_client(c) as client:
        whole = await client.messages.create(**CLAUDE_CODE)
        async with client.messages.stream(**CLAUDE_CODE) as stream:
            events = [event async for event in stream]
        assert [block.type for block in whole.content] == ["thinking", "text"]
        # Nothing was taken out of the conversation.
        (end,) = [event for event in events if event.type == "message_delta"]
        for told in (whole, end):
            assert told.model_extra["context_management"] == {"applied_edits": []}
        plain = await client.messages.create(**CLAUDE_CODE | {"extra_body": {}})
        assert "context_management" not in plain.model_extra


@pytest.mark.parametrize(
    "given, kwargs",
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True, "thinking": True}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}},
            {"enable_thinking": False, "thinking": False, "reasoning_effort": "max"},
        ),
    ],
)
def test_thinking_and_effort_are_variables_of_the_template(given, kwargs):
    (asked,) = read_messages({"messages": [USER], "max_tokens": 5, **given}).requests
    counted, _ = read_count_tokens({"messages": [USER], **given})
    for messages in (asked.messages, counted.messages):
        told = messages.chat_template_kwargs
        assert (json.loads(told) if told else None) == kwargs


@pytest.mark.parametrize(
    "change, word",
    [
        ({"thinking": {"type": "often"}}, "thinking: "),
        ({"thinking": "on"}, "thinking: "),
        ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens: "),
        ({"thinking": {"type": "enabled", "budget_tokens": "all"}}, "thinking.budget_tokens: "),
        ({"thinking": {"type": "adaptive", "display": "hidden"}}, "thinking.display: "),
        ({"output_config": {"effort": "some"}}, "output_config.effort: "),
        ({"context_management": []}, "context_management: "),
    ],
)
async def test_what_is_wrong_with_them_is_told_in_its_words(served, change, word):
    async with served() as (c, _), anthropic_client(c) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(model="fake", max_tokens=9, messages=[USER], extra_body=change)
        assert caught.value.body["error"]["message"].startswith(word)


def function(name: str, **fields) -> dict:
    parameters = {"type": "object", "properties": {"target": {"type": "string"}}}
    return {"type": "function", "name": name, "description": f"To {name}.", "strict": False, "parameters": parameters, **fields}  # fmt: skip


AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [function("spawn"), function("wait")],
}
SEARCH = {"type": "web_search", "external_web_access": False}
CODEX = {
    "model": "fake",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You code."}], "id": "msg_1"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it"}], "id": "msg_2"},
    ],
    "tools": [function("exec"), AGENTS, SEARCH],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "extra_body": {"client_metadata": {"turn_id": "01a2", "x-codex-turn-metadata": "{}"}},
}  # fmt: skip
WAIT = '<tool_call>{"name": "agents__wait", "arguments": {"target": "x"}}</tool_call>'


async def test_a_request_of_codex_is_answered(saying):
    async with saying(WAIT, http="127.0.0.1:0") as c, openai_client(c) as client:
        whole = await client.responses.create(**CODEX)
        async with await client.responses.create(**CODEX, stream=True) as stream:
            events = [event async for event in stream]
        (done,) = [event.item for event in events if event.type == "response.output_item.done"]
        for call in (whole.output[0], done, events[-1].response.output[0]):
            assert (call.type, call.name, call.namespace) == ("function_call", "wait", "agents")
        # What the model was not told of is not in what an answer repeats.
        assert [tool.type for tool in whole.tools] == ["function", "namespace"]
        asked = [m.spec for kind, m in c.prefill[0].commands if kind == "prefill"][-1]
        prompt = c.pipeline.text.detokenizer.decode(asked.token_ids[: asked.num_prompt_tokens])
        tools, _ = json.JSONDecoder().raw_decode(prompt)
        assert [(tool["function"]["name"], tool["function"]["description"]) for tool in tools] == [
            ("exec", "To exec."), ("agents__spawn", "Other agents.\n\nTo spawn."), ("agents__wait", "To wait."),
        ]  # fmt: skip
        items = [*CODEX["input"], done, {"type": "function_call_output", "call_id": done.call_id, "output": "no"}]
        again = await client.responses.create(**CODEX | {"input": items})
        assert again.output[0].namespace == "agents"


def test_a_function_of_a_namespace_is_chosen_by_its_name():
    choice = {"type": "function", "name": "wait", "namespace": "agents"}
    body = {"input": "a", "tools": [AGENTS], "tool_choice": choice}
    assert read_response(body).requests[0].messages.tool_name == "agents__wait"


def test_a_function_of_a_namespace_has_a_name():
    """Else it is refused as one outside of a namespace is."""
    request = read_response({"input": "a", "tools": [{**AGENTS, "tools": [function("")]}]}).requests[0]
    assert request.messages.tools[0].name == ""


def test_a_call_comes_back_by_the_name_that_the_model_knows():
    item = {"type": "function_call", "call_id": "a", "name": "wait", "namespace": "agents", "arguments": "{}"}
    (message,) = read_response({"input": [item]}).requests[0].messages.messages
    assert message.tool_calls[0].name == "agents__wait"


@pytest.mark.parametrize(
    "tools, param",
    [
        ([SEARCH], "tools[0].type"),
        ([function("exec"), {"type": "file_search"}], "tools[1].type"),
        ([function("exec"), {**AGENTS, "name": None}], "tools[1].name"),
        ([function("exec"), {**AGENTS, "defer": True}], "tools[1].defer"),
        ([SEARCH, {**AGENTS, "tools": [function("wait"), SEARCH]}], "tools[1].tools[1].type"),
        ([SEARCH, {**AGENTS, "tools": [function("wait"), function("wait")]}], "tools[1].tools[1].name"),
        ([SEARCH, {**AGENTS, "tools": [function("wait", parameters=7)]}], "tools[1].tools[0].parameters"),
        ([function("exec"), {**AGENTS, "tools": [function(f"f{n}") for n in range(128)]}], "tools[1].tools"),
    ],
)
async def test_what_is_wrong_with_its_tools_is_told_by_its_name(served, tools, param):
    async with served() as (_, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**CODEX | {"tools": tools})
        assert caught.value.param == param


async def test_the_notes_of_a_client_are_strings(served):
    async with served() as (_, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**CODEX | {"extra_body": {"client_metadata": {"a": 1}}})
        assert caught.value.param == "client_metadata"


CALLS = [{"id": "c1", "type": "function", "function": {"name": "wait", "arguments": "{}"}}]
# The part that is an answer's text has all else of its message too.
REPEATING = {"type": "text", "text": "I look.", "role": "assistant", "refusal": None, "reasoning_content": "Where?", "tool_calls": CALLS}  # fmt: skip


@pytest.mark.parametrize("calls", [CALLS, None])
def test_the_part_of_an_answer_may_repeat_its_message(calls):
    answer = {"role": "assistant", "content": [REPEATING], "tool_calls": calls}
    result = [{"role": "tool", "tool_call_id": "c1", "content": "3"}] if calls else []
    said = read_chat({"messages": [USER, answer, *result]}).requests[0].messages.messages[1]
    assert (said.content, said.reasoning) == ("I look.", "Where?")  # what was thought stands nowhere else
    assert [call.id for call in said.tool_calls] == (["c1"] if calls else [])


def test_parts_of_others_repeat_nothing():
    for message, field in (
        ({"role": "user", "content": [REPEATING]}, "reasoning_content"),
        ({"role": "assistant", "content": [{**REPEATING, "a": 1}]}, "a"),
    ):
        with pytest.raises(InvalidRequest, match=rf"messages\[0\]\.content\[0\]\.{field}: is not supported here"):
            read_chat({"messages": [message]})


RESULT = {"role": "tool", "content": "3", "name": "wait", "id": "c1", "extra": {"function_id": "c1"}}


def test_qwen_agent_names_the_call_of_a_result_by_an_id():
    answer = {"role": "assistant", "content": "", "tool_calls": CALLS}
    for result in (RESULT, {**RESULT, "tool_call_id": "c1"}, {**RESULT, "tool_call_id": "c1", "id": "m7"}):
        *_, told = read_chat({"messages": [USER, answer, result]}).requests[0].messages.messages
        assert (told.role, told.content, told.tool_call_id) == ("tool", "3", "c1")


@pytest.mark.parametrize(
    "message, word",
    [
        ({**USER, "id": "m7"}, "messages[0].id: "),
        ({**USER, "extra": {}}, "messages[0].extra: "),
        ({**RESULT, "extra": "no"}, "messages[0].extra: "),
        ({**RESULT, "id": 7}, "messages[0].id: "),
    ],
)
def test_what_is_wrong_with_these_is_told_by_name(message, word):
    with pytest.raises(InvalidRequest) as caught:
        read_chat({"messages": [message]})
    assert str(caught.value).startswith(word)
