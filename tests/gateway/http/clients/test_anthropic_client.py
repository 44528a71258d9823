"""Anthropic's own client, against what the gRPC door says of the same request."""

import contextlib
import json
import sys

import anthropic
import openai
import pytest
from pydantic import BaseModel

from baton.v1 import inference_pb2 as pb
from gateway.http.anthropic.answer import MessageWriter
from gateway.http.anthropic.request import read_messages
from gateway.http.fields.body import ParsedBody
from gateway.http.wire.encoding import to_bytes
from tests.gateway.calls import over_grpc
from tests.gateway.http.clients.anthropic_calls import anthropic_client
from tests.gateway.http.conftest import openai_client
from tests.support.pace import patience

ASK = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "a quick fox"}]}


@pytest.fixture
def asked(served):
    """`async with asked(**settings) as (c, client)`."""

    @contextlib.asynccontextmanager
    async def start(**settings):
        async with served(**settings) as (c, _), anthropic_client(c) as client:
            yield c, client

    return start


async def test_a_message_says_what_grpc_says(asked):
    async with asked() as (c, client):
        said = await over_grpc(c, [("user", "a quick fox")], max_tokens=9)
        whole = await client.messages.create(**ASK)
        assert [(block.type, block.text) for block in whole.content] == [("text", said.text)]
        assert (whole.role, whole.model, whole.stop_reason, whole.stop_sequence) == (
            "assistant", "fake", "max_tokens", None,
        )  # fmt: skip
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (said.usage.prompt_tokens, 9)


async def test_a_stream_has_the_events_of_the_client_s_own_accumulator(asked):
    async with asked() as (_, client):
        whole = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert kinds.count("content_block_delta") > 1
        assert final.content[0].text == whole.content[0].text
        assert (final.stop_reason, final.usage.input_tokens, final.usage.output_tokens) == (
            "max_tokens", whole.usage.input_tokens, 9,
        )  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_sequence_is_told(asked, streams):
    async with asked() as (_, client):
        text = (await client.messages.create(**ASK)).content[0].text
        stop = text[3:5]
        asks = {**ASK, "stop_sequences": [stop]}
        if streams:
            async with client.messages.stream(**asks) as stream:
                said = await stream.get_final_message()
        else:
            said = await client.messages.create(**asks)
        assert said.content[0].text == text[: text.index(stop)]
        assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", stop)


async def test_a_conversation_goes_on_from_an_answer_as_the_client_holds_it(asked):
    async with asked() as (c, client):
        first = await client.messages.create(system="be brief", **ASK)
        texts = [("system", "be brief"), ("user", "a quick fox"), ("assistant", first.content[0].text), ("user", "on")]
        said = await over_grpc(c, texts, max_tokens=9)
        cached = {"type": "ephemeral"}
        again = await client.messages.create(
            **{**ASK, "messages": [
                *ASK["messages"],
                {"role": "assistant", "content": [first.content[0].model_dump()]},
                {"role": "user", "content": [{"type": "text", "text": "on", "cache_control": cached}]},
            ]},
            system=[{"type": "text", "text": "be brief", "cache_control": cached}],
            metadata={"user_id": "someone"},
        )  # fmt: skip
        assert again.content[0].text == said.text


async def test_tokens_are_counted(asked):
    async with asked() as (c, client):
        counted = await client.messages.count_tokens(model="fake", messages=ASK["messages"])
        messages = pb.Messages(messages=[pb.Message(role="user", content="a quick fox")])
        tokenized = await c.stub.Tokenize(pb.TokenizeRequest(messages=messages), timeout=patience(20))
        assert (
            counted.input_tokens == len(tokenized.token_ids) == (await client.messages.create(**ASK)).usage.input_tokens
        )


@pytest.mark.parametrize(
    "change, error, kind, word",
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error", "other"),
        ({"max_tokens": 5000}, anthropic.BadRequestError, "invalid_request_error", "max_tokens: "),
        (
            {"max_tokens": 1020},
            anthropic.BadRequestError,
            "invalid_request_error",
            "`max_tokens` exceed context limit: ",
        ),
        ({"system": "zyx" * 1000}, anthropic.BadRequestError, "invalid_request_error", "prompt is too long: "),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "messages: "),
        ({"extra_body": {"top_k": -7}}, anthropic.BadRequestError, "invalid_request_error", "top_k: "),
        ({"extra_body": {"n": 2}}, anthropic.BadRequestError, "invalid_request_error", "n: "),
        ({"extra_headers": {"x-request-timeout": "0"}}, anthropic.APIStatusError, "timeout_error", "deadline"),
        ({"extra_body": {"system": "a" * 1_100_000}}, anthropic.RequestTooLargeError, "request_too_large", "body: "),
    ],
)
async def test_errors_are_told_in_its_form(asked, change, error, kind, word):
    async with asked() as (_, client):
        with pytest.raises(error) as caught:
            await client.messages.create(**{**ASK, **change})
        assert caught.value.body["error"]["type"] == kind and word in caught.value.body["error"]["message"]


async def test_what_was_too_late_is_not_sent_again(asked):
    """By their own rules clients send a 504 twice more: each time all was computed until the deadline."""
    late = {"extra_headers": {"x-request-timeout": "0"}}
    async with asked() as (c, client), openai_client(c, max_retries=2) as other:
        for create, error in (
            (client.with_options(max_retries=2).messages.create, anthropic.APIStatusError),
            (other.chat.completions.create, openai.APIStatusError),
        ):
            with pytest.raises(error, match="deadline") as caught:
                await create(**ASK, **late)
            assert caught.value.status_code == 504
            assert caught.value.request.headers["x-stainless-retry-count"] == "0"


async def test_overload_and_shutting_down(asked):
    async with asked(max_concurrent_requests=1) as (c, client):
        c.decode[0].hold("decode")
        async with client.messages.stream(**ASK) as stream:
            await anext(aiter(stream))
            with pytest.raises(anthropic.RateLimitError) as caught:
                await client.messages.create(**ASK)
            assert int(caught.value.response.headers["retry-after"]) >= 1
        c.decode[0].release("decode")
        c.gateway.handler.is_draining = True
        with pytest.raises(anthropic.ServiceUnavailableError) as caught:
            await client.messages.create(**ASK)
        assert caught.value.body["error"]["type"] == "overloaded_error"


async def test_what_fails_after_the_first_token_is_an_event_of_its_own(asked):
    async with asked() as (c, client):
        c.decode[0].hold("decode")
        with pytest.raises(anthropic.APIStatusError, match="deadline") as caught:
            async with client.messages.stream(**ASK, extra_headers={"x-request-timeout": "0.5"}) as stream:
                assert (await anext(aiter(stream))).type == "message_start"
                await stream.until_done()
        assert caught.value.body["error"]["type"] == "timeout_error"
        c.decode[0].release("decode")


async def test_reasoning_is_a_block_before_the_text(saying):
    ask = {"model": "fake", "max_tokens": 400, "messages": [{"role": "user", "content": "a fox"}]}
    async with saying("<think>\nI look.\n</think>\n\nA fox.", http="127.0.0.1:0") as c, anthropic_client(c) as client:
        whole = await client.messages.create(**ask)
        assert [block.type for block in whole.content] == ["thinking", "text"]
        assert (whole.content[0].thinking, whole.content[1].text) == ("I look.", "A fox.")
        # Of reasoning without one litellm makes nothing in the next request, pydantic-ai words of the user.
        assert whole.content[0].signature
        async with client.messages.stream(**ask) as stream:
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"]
        for usage in (whole.usage, final.usage):
            assert 0 < usage.output_tokens_details.thinking_tokens < usage.output_tokens
        assert final.content[0] == whole.content[0] and final.content[1].text == "A fox."
        messages = [*ask["messages"], {"role": "assistant", "content": final.content}, *ask["messages"]]
        assert (await client.messages.create(**{**ask, "messages": messages})).content[1].text == "A fox."


async def test_reasoning_that_is_not_displayed_comes_back_in_its_signature(saying):
    """As the Agent SDK asks; models that call tools go on from what they thought."""
    ask = {"model": "fake", "max_tokens": 400, "messages": [{"role": "user", "content": "a fox"}]}
    ask["thinking"] = {"type": "adaptive", "display": "omitted"}
    async with (
        saying("<think>\nI look: ü.\n</think>\n\nA fox.", http="127.0.0.1:0") as c,
        anthropic_client(c) as client,
    ):
        whole = await client.messages.create(**ask)
        assert [(block.type, getattr(block, "thinking", None)) for block in whole.content] == [
            ("thinking", ""),
            ("text", None),
        ]
        assert whole.content[1].text == "A fox." and whole.usage.output_tokens_details.thinking_tokens > 0
        async with client.messages.stream(**ask) as stream:
            deltas = [event.delta.type async for event in stream if event.type == "content_block_delta"]
            final = await stream.get_final_message()
        assert deltas[0] == "signature_delta" and set(deltas[1:]) == {"text_delta"}
        assert final.content[0] == whole.content[0] and final.content[1].text == "A fox."
        content = [block.model_dump() for block in final.content]
        said = read_messages({**ask, "messages": [{"role": "assistant", "content": content}, *ask["messages"]]})
        assert said.requests[0].messages.messages[0].reasoning == "I look: ü."


CALL = '<tool_call>{"name": "find", "arguments": {"text": "fox"}}</tool_call>'
FIND = {"name": "find", "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}}}
DEEP = json.loads('{"a":' * 70 + "1" + "}" * 70)
TOOLS = {"model": "fake", "max_tokens": 400, "messages": ASK["messages"], "tools": [FIND]}


def told(content) -> list[tuple]:
    return [(each.type, each.name, each.input) if each.type == "tool_use" else (each.type,) for each in content]


async def test_calls_are_blocks_and_their_results_are_messages(saying):
    said = f"<think>\nI look.\n</think>\n\nOne moment.\n{CALL}\n{CALL}"
    use = ("tool_use", "find", {"text": "fox"})
    async with saying(said, http="127.0.0.1:0") as c, anthropic_client(c) as client:
        whole = await client.messages.create(**TOOLS)
        assert (told(whole.content), whole.stop_reason) == ([("thinking",), ("text",), use, use], "tool_use")
        async with client.messages.stream(**TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_message()
        assert (told(final.content), final.stop_reason) == (told(whole.content), "tool_use")
        for index in (2, 3):
            of_block = [each for each in events if each.type == "content_block_delta" and each.index == index]
            parts = [each.delta.partial_json for each in of_block]
            assert json.loads("".join(parts)) == {"text": "fox"} and len(parts) > 2
        results = [
            {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "here"},
            {"type": "tool_result", "tool_use_id": final.content[3].id, "content": [{"type": "text", "text": "there"}], "is_error": True},
            {"type": "text", "text": "and now?"},
        ]  # fmt: skip
        answered = [
            *ASK["messages"],
            {"role": "assistant", "content": final.content},
            {"role": "user", "content": results},
        ]
        counted = await client.messages.count_tokens(model="fake", messages=answered, tools=[FIND])
        again = await client.messages.create(**{**TOOLS, "messages": answered})
        assert counted.input_tokens == again.usage.input_tokens + again.usage.cache_read_input_tokens
        asked = [m.spec for kind, m in c.prefill[0].commands if kind == "prefill"][-1]
        prompt = c.pipeline.text.detokenizer.decode(asked.token_ids[: asked.num_prompt_tokens])
        assert prompt.endswith('{"name": "find", "arguments": {"text": "fox"}}<|tool|>here<|tool|>thereand now?')


async def test_choices_of_tools(saying, capable):
    async with saying(f"So: {CALL}{CALL}", http="127.0.0.1:0") as c, anthropic_client(c) as client:
        for choice, num_uses in (
            ({"type": "none"}, 0),
            ({"type": "auto", "disable_parallel_tool_use": True}, 1),
            ({"type": "auto"}, 2),
        ):
            said = await client.messages.create(**TOOLS, tool_choice=choice)
            assert len([block for block in said.content if block.type == "tool_use"]) == num_uses
        for choice in ({"type": "any"}, {"type": "tool", "name": "find"}, {"type": "auto"}):
            await client.messages.create(**{**TOOLS, "tools": [{**FIND, "strict": True}]}, tool_choice=choice)
            spec = [m.spec for kind, m in c.prefill[0].commands if kind == "prefill"][-1]
            assert "find" in spec.constraint.grammar


async def test_a_tool_may_ask_for_its_arguments_as_they_are_written(saying):
    async with saying(CALL, http="127.0.0.1:0") as c, anthropic_client(c) as client:
        tools = [{**FIND, "eager_input_streaming": True}]  # as the AI SDK asks in every stream
        async with client.messages.stream(**{**TOOLS, "tools": tools}) as stream:
            parts = [event.partial_json async for event in stream if event.type == "input_json"]
        assert len(parts) > 2 and json.loads("".join(parts)) == {"text": "fox"}
        assert (await client.messages.count_tokens(model="fake", messages=TOOLS["messages"], tools=tools)).input_tokens


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_a_thread_is_refused_so_that_clients_go_on_without_one(asked, thread):
    async with asked() as (_, client):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**ASK, extra_body={"thread": thread})
        told = caught.value.body["error"]
        assert told["message"].startswith("thread: ") and told["type"] == "invalid_request_error"
        # By these the runners of tools of the clients know to bring the whole conversation instead.
        assert told["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        await client.messages.create(**ASK, extra_body={"thread": None})


class Fox(BaseModel):
    legs: int


async def test_an_output_format_is_a_constraint(saying, capable):
    async with saying('{"legs": 4}', tool_call_parser="none", http="127.0.0.1:0") as c, anthropic_client(c) as client:
        parsed = await client.messages.parse(**ASK | {"max_tokens": 400}, output_format=Fox)
        async with client.messages.stream(**ASK | {"max_tokens": 400}, output_format=Fox) as stream:
            final = await stream.get_final_message()
        assert parsed.parsed_output == final.parsed_output == Fox(legs=4)
        counted = await client.messages.count_tokens(model="fake", messages=ASK["messages"], output_format=Fox)
        assert counted.input_tokens == parsed.usage.input_tokens
        specs = [m.spec for kind, m in c.prefill[0].commands if kind == "prefill"]
        assert [json.loads(each.constraint.json_schema)["required"] for each in specs] == [["legs"]] * 2


@pytest.mark.parametrize(
    "change, word",
    [
        ({"output_config": {"effort": "some"}}, "output_config.effort: "),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type: "),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "output_config.format.schema: "),
        ({"output_config": "json"}, "output_config: "),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_an_output_format_is_told_in_its_words(asked, capable, change, word):
    async with asked() as (_, client):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**ASK, extra_body=change)
        assert caught.value.body["error"]["message"].startswith(word)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"tools": [FIND, FIND]}, "tools[1].name: "),
        ({"tools": [{**FIND, "input_schema": DEEP}]}, "tools[0].input_schema: "),
        ({"tool_choice": {"type": "tool", "name": "lose"}}, "tool_choice.name: "),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages[0].content[0].tool_use_id: "),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_tools_is_told_in_its_words(asked, change, word):
    async with asked() as (_, client):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**{**TOOLS, "system": "be brief", **change})
        assert caught.value.body["error"]["message"].startswith(word)


def test_arguments_of_the_call_before_come_before_the_text():
    writer = MessageWriter(ParsedBody("msg_1", [pb.GenerateRequest()], {}, stream=True), "fake")
    begun = pb.GenerateResponse(tool_calls=[pb.ToolCall(id="a", name="find", arguments='{"n"')])
    more = [pb.ToolCall(arguments=": 1}"), pb.ToolCall(id="b", name="find", arguments="{}")]
    data = writer.chunk(0, begun) + writer.chunk(0, pb.GenerateResponse(text="and", tool_calls=more))
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
    assert [(each["index"], *each["delta"].values()) for each in events if each["type"] == "content_block_delta"] == [
        (0, "input_json_delta", '{"n"'), (0, "input_json_delta", ": 1}"), (1, "text_delta", "and"),
        (2, "input_json_delta", "{}"),
    ]  # fmt: skip


def test_reasoning_ends_with_its_signature_and_nothing_else_has_one():
    writer = MessageWriter(ParsedBody("msg_1", [pb.GenerateRequest()], {}, stream=True), "fake")
    messages = [
        pb.GenerateResponse(reasoning="I "),
        pb.GenerateResponse(reasoning="look."),
        pb.GenerateResponse(text="so"),
    ]
    data = b"".join(writer.chunk(0, each) for each in messages) + writer.tail([pb.Usage()])
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
    # Without it the AI SDK leaves the reasoning out of the next request.
    assert [(each["index"], each.get("delta", {}).get("type", each["type"])) for each in events if "index" in each] == [
        (0, "content_block_start"), (0, "thinking_delta"), (0, "thinking_delta"), (0, "signature_delta"),
        (0, "content_block_stop"), (1, "content_block_start"), (1, "text_delta"), (1, "content_block_stop"),
    ]  # fmt: skip


def test_a_message_that_begins_tells_what_its_prompt_has():
    writer = MessageWriter(ParsedBody("msg_1", [pb.GenerateRequest()], {}, stream=True), "fake")
    begun = writer.chunk(0, pb.GenerateResponse(text="a", prompt_tokens=77)).decode().splitlines()[1]
    assert json.loads(begun[6:])["message"]["usage"]["input_tokens"] == 77


def test_arguments_are_json_whatever_the_model_wrote():
    writer = MessageWriter(ParsedBody("msg_1", [pb.GenerateRequest()], {}), "fake")
    call = pb.ToolCall(id="a", name="find", arguments='{"half": "\\ud83d", "n": [1e999, -1e999, 0.5]}')
    told = to_bytes(writer.whole([pb.CompleteResponse(choices=[pb.Choice(tool_calls=[call])])]))
    (block,) = json.loads(told, parse_constant=pytest.fail)["content"]
    assert block["input"] == {"half": "\ud83d", "n": [sys.float_info.max, -sys.float_info.max, 0.5]}
