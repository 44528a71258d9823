"""Tools, calls and reasoning with OpenAI's own client, whole and streamed."""

import json
from decimal import Decimal
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.gateway.http.conftest import openai_client

CALL = '<tool_call>{"name": "find", "arguments": {"text": "fox"}}</tool_call>'
SAID = f"<think>\nI look.\n</think>\n\nOne moment.\n{CALL}\n{CALL}"
USER = {"role": "user", "content": "a fox"}
FIND = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}
ASK = {"model": "fake", "messages": [USER], "max_completion_tokens": 400, "tools": [FIND]}


async def test_calls_whole(saying):
    async with saying(SAID, http="127.0.0.1:0") as c, openai_client(c) as client:
        choice = (await client.chat.completions.create(**ASK)).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "One moment.")
        assert choice.message.model_extra["reasoning_content"] == "I look."
        calls = choice.message.tool_calls
        assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("function", "find", {"text": "fox"})
        ] * 2
        assert calls[0].id != calls[1].id
        # The client's own object is the next request's message.
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "here"} for call in calls]
        again = await client.chat.completions.create(**{**ASK, "messages": [USER, choice.message, *answers]})
        assert again.choices[0].message.content == "One moment."


async def test_calls_streamed(saying):
    async with saying(SAID, http="127.0.0.1:0") as c, openai_client(c) as client:
        reasoning, parts = "", []
        async with client.chat.completions.stream(**ASK) as stream:
            async for event in stream:
                if event.type == "chunk" and event.chunk.choices:
                    delta = event.chunk.choices[0].delta
                    reasoning += (delta.model_extra or {}).get("reasoning_content", "")
                    parts += [(part.index, part.id) for part in delta.tool_calls or ()]
            choice = (await stream.get_final_completion()).choices[0]
        assert (reasoning, choice.message.content, choice.finish_reason) == ("I look.", "One moment.", "tool_calls")
        calls = choice.message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("find", {"text": "fox"})
        ] * 2

    # Arguments come as they are written; the id comes with the first part alone.
    for index, call in enumerate(calls):
        ids = [each for number, each in parts if number == index]
        assert ids[0] == call.id and len(ids) > 2 and not any(ids[1:])


@pytest.mark.parametrize("more", [{"reasoning": {"exclude": True}}, {"include_reasoning": False}], ids=str)
async def test_reasoning_is_left_out_where_nobody_wants_it(saying, more):
    ask = {**ASK, "extra_body": more}
    async with saying(SAID, http="127.0.0.1:0") as c, openai_client(c) as client:
        whole = await client.chat.completions.create(**ask)
        assert whole.choices[0].message.content == "One moment." and len(whole.choices[0].message.tool_calls) == 2
        assert "reasoning_content" not in whole.choices[0].message.model_extra
        assert whole.usage.completion_tokens_details.reasoning_tokens > 0
        content, chunks = "", [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]
        for delta in (chunk.choices[0].delta for chunk in chunks):
            assert "reasoning_content" not in (delta.model_extra or {})
            content += delta.content or ""
        assert content == "One moment." and chunks[0].choices[0].delta.role == "assistant"


async def test_usage_tells_how_many_tokens_the_reasoning_took(saying):
    async with saying(SAID, http="127.0.0.1:0") as c, openai_client(c) as client:
        whole = (await client.chat.completions.create(**ASK)).usage
        async with client.chat.completions.stream(**ASK, stream_options={"include_usage": True}) as stream:
            streamed = (await stream.get_final_completion()).usage
        response = (await client.responses.create(model="fake", input="a fox", max_output_tokens=400)).usage
        for usage in (whole, streamed):
            num_reasoning = usage.completion_tokens_details.reasoning_tokens
            assert 0 < num_reasoning < usage.completion_tokens / 2
            assert num_reasoning == response.output_tokens_details.reasoning_tokens


async def test_a_call_alone_has_no_content(saying):
    async with saying(CALL, http="127.0.0.1:0") as c, openai_client(c) as client:
        message = (await client.chat.completions.create(**ASK)).choices[0].message
        assert message.content is None and len(message.tool_calls) == 1


async def test_a_last_message_is_continued_and_template_variables_arrive(served):
    async with served() as (c, client):
        messages = [USER, {"role": "assistant", "content": "The quick"}]
        extra = {"continue_final_message": True, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
        await client.chat.completions.create(model="fake", messages=messages, max_tokens=2, extra_body=extra)
        spec = next(message.spec for kind, message in c.prefill[0].commands if kind == "prefill")
        prompt = c.pipeline.text.detokenizer.decode(spec.token_ids[: spec.num_prompt_tokens])
        assert prompt == "a foxThe quick"


CALLING = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "find", "arguments": "[]"}}]}  # fmt: skip
NAMED = {"type": "function", "function": {"name": "find"}}
BAD = [
    ({"tool_choice": "some"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": {**NAMED, "function": {"name": "lose"}}}, "tool_choice.function.name"),
    ({"tool_choice": {**NAMED, "function": {}}}, "tool_choice.function.name"),
    ({"tools": [{**FIND, "function": {**FIND["function"], "strict": 1}}]}, "tools[0].function.strict"),
    ({"tools": [FIND, FIND]}, "tools[1].name"),
    ({"messages": [USER, CALLING]}, "messages[1].tool_calls[0].arguments"),
    ({"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [{**USER, "role": "robot"}]}, "messages[0].role"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_what_cannot_be_is_told_by_its_name(served, fields, param):
    async with served() as (_, client):
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(**{**ASK, **fields})
        assert error.value.param == param


async def test_choices_of_tools(saying, capable):
    async with saying(f"So: {CALL}{CALL}", http="127.0.0.1:0") as c, openai_client(c) as client:
        for fields, num_calls in (
            ({"tool_choice": "none"}, 0),
            ({"parallel_tool_calls": False}, 1),
            ({"tool_choice": "auto"}, 2),
        ):
            choice = (await client.chat.completions.create(**ASK, **fields)).choices[0]
            assert len(choice.message.tool_calls or ()) == num_calls
        strict = {**FIND, "function": {**FIND["function"], "strict": True}}
        for fields, is_bound in (
            ({"tool_choice": "required"}, True),
            ({"tool_choice": NAMED}, True),
            ({"tools": [strict]}, True),
            ({"tools": [strict], "tool_choice": "none"}, False),
            ({}, False),
        ):
            await client.chat.completions.create(**{**ASK, **fields})
            spec = [m.spec for kind, m in c.prefill[0].commands if kind == "prefill"][-1]
            assert ("find" in spec.constraint.grammar) == is_bound


class Order(BaseModel):
    price: Decimal  # a pattern with look-around
    marks: set[int]
    size: Literal["small", "large"]


EMPTY = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["n"]}


async def test_a_schema_that_cannot_be_kept_to_is_an_error_of_a_strict_tool_alone(saying, capable):
    def tool(schema, **fields) -> dict:
        return {"type": "function", "function": {"name": "find", "parameters": schema, **fields}}

    async with saying(CALL, http="127.0.0.1:0") as c, openai_client(c) as client:
        for schema, word in ((Order.model_json_schema(), '"large"'), (EMPTY, '{"type": "object", "x-guidance"')):
            for choice in ("required", NAMED):
                asked = {**ASK, "tools": [tool(schema)], "tool_choice": choice}
                assert (await client.chat.completions.create(**asked)).choices[0].message.tool_calls
                spec = [m.spec for kind, m in c.prefill[0].commands if kind == "prefill"][-1]
                assert word in spec.constraint.grammar
            with pytest.raises(openai.BadRequestError, match="uniqueItems|nsatisfiable") as error:
                await client.chat.completions.create(**{**asked, "tools": [tool(schema, strict=True)]})
            assert error.value.param == "tools[0].parameters"
