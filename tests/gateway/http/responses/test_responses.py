"""The Responses API by OpenAI's own client, against what the gRPC door says of the same request."""

import json
import shutil
import tracemalloc
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from baton.v1 import inference_pb2 as pb
from gateway.api.request_handler import CallContext, RequestHandler
from gateway.http.app import HttpApi
from gateway.http.fields.body import ParsedBody
from gateway.http.openapi import document
from gateway.http.responses.answer import NUM_LEVELS, ResponseWriter
from gateway.http.responses.request import LOGPROBS, read_response
from gateway.http.wire.encoding import to_bytes_in_turns
from tests.gateway.calls import over_grpc
from tests.gateway.http.conftest import openai_client
from tests.gateway.http.loop_turns import turns

ASK = {"model": "fake", "input": "a quick fox", "max_output_tokens": 9, "extra_body": {"seed": 7}}
KINDS = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done", "response.output_item.done",
    "response.incomplete",
]  # fmt: skip


async def test_a_response_says_what_grpc_says(served):
    async with served() as (c, client):
        said = await over_grpc(c, [("user", "a quick fox")], max_tokens=9, seed=7, logprobs=2)
        whole = await client.responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2)
        assert whole.output_text == said.text
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (said.usage.prompt_tokens, 9)
        logprobs = whole.output[0].content[0].logprobs
        told = said.choices[0].logprobs
        assert [each.logprob for each in logprobs] == [pytest.approx(logprob) for _, logprob, _ in told]
        assert [len(each.top_logprobs) for each in logprobs] == [len(top) for _, _, top in told]
        assert (whole.model_extra["store"], whole.previous_response_id) == (False, None)


async def test_metadata_comes_back_and_there_is_one_tier(served):
    async with served() as (_, client):
        told = await client.responses.create(**ASK, metadata={"trace": "7"}, service_tier="flex")
        assert (told.metadata, told.service_tier) == ({"trace": "7"}, "default")
        assert (await client.responses.create(**ASK)).metadata == {}


async def test_a_stream_has_the_events_of_the_client_s_own_accumulator(served):
    async with served() as (_, client):
        whole = await client.responses.create(**ASK)
        events, logprobs = [], []
        async with client.responses.stream(**ASK, include=["message.output_text.logprobs"]) as stream:
            async for event in stream:
                events.append(event)
                logprobs += getattr(event, "logprobs", None) or [] if event.type.endswith("delta") else []
        final = events[-1].response
        assert list(dict.fromkeys(event.type for event in events)) == KINDS
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert final.output_text == whole.output_text and len(logprobs) == 9
        assert final.usage.total_tokens == whole.usage.total_tokens


async def test_a_conversation_goes_on_from_an_answer_as_the_client_holds_it(served):
    async with served() as (c, client):
        first = await client.responses.create(**ASK, instructions="be brief", store=False)
        texts = [("system", "be brief"), ("user", "a quick fox"), ("assistant", first.output_text), ("user", "on")]
        said = await over_grpc(c, texts, max_tokens=9, seed=7)
        items = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "input_text", "text": "a quick fox"}]},
            *first.output,
            {"role": "user", "content": "on"},
        ]
        again = await client.responses.create(**{**ASK, "input": items})
        assert again.output_text == said.text


async def test_an_answer_that_ends_by_itself_is_completed(served):
    async with served() as (c, client):
        said = await over_grpc(c, [("user", "a quick fox")], max_tokens=9, seed=7)
        whole = await client.responses.create(**{**ASK, "extra_body": {"seed": 7, "stop": said.text[3:5]}})
        assert (whole.status, whole.incomplete_details) == ("completed", None)
        async with client.responses.stream(**{**ASK, "extra_body": {"seed": 7, "stop": said.text[3:5]}}) as stream:
            assert (await stream.get_final_response()).output_text == whole.output_text
        assert whole.output_text == said.text[: said.text.index(said.text[3:5])]


@pytest.mark.parametrize(
    "change, param",
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
    ],
)
async def test_what_is_refused_is_named(served, change, param):
    async with served() as (_, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{**ASK, **change})
        assert caught.value.param == param


async def test_who_wants_an_answer_stored_is_told_that_it_is_not(served):
    """As VS Code asks with a key of one's own: the next request refers to the answer, and the one after has all."""
    async with served() as (_, client):
        first = await client.responses.create(**ASK, store=True)
        assert first.model_extra["store"] is False
        for ask in (client.responses.create, client.responses.input_tokens.count):
            with pytest.raises(openai.BadRequestError, match="nothing is stored") as caught:
                await ask(model="fake", input="on", previous_response_id=first.id)
            told = caught.value
            assert (told.status_code, told.code, told.param) == (
                400,
                "previous_response_not_found",
                "previous_response_id",
            )


async def test_who_refers_to_what_is_not_stored_is_told_what_to_do(served):
    """As the AI SDK does in the second request of a tool loop."""
    items = [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_1"}]
    async with served() as (_, client):
        with pytest.raises(
            openai.BadRequestError, match="nothing is stored; with store: false clients send items"
        ) as caught:
            await client.responses.create(**{**ASK, "input": items})
        assert caught.value.param == "input[1].type"


async def test_what_fails_after_the_first_token_is_the_last_event(served):
    async with served() as (c, client):
        c.decode[0].hold("decode")
        with pytest.raises(openai.APIError, match="deadline"):
            async with client.responses.stream(**ASK, extra_headers={"x-request-timeout": "0.5"}) as stream:
                async for _ in stream:
                    pass
        c.decode[0].release("decode")


async def test_reasoning_is_an_item_before_the_message(saying):
    ask = {"model": "fake", "input": "a fox", "max_output_tokens": 400}
    async with saying("<think>\nI look.\n</think>\n\nA fox.", http="127.0.0.1:0") as c, openai_client(c) as client:
        whole = await client.responses.create(**ask)
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        assert (whole.output[0].content[0].text, whole.output_text) == ("I look.", "A fox.")
        reasoning, items, parts = "", [], []
        async with client.responses.stream(**ask) as stream:
            async for event in stream:
                if event.type in ("response.content_part.added", "response.content_part.done"):
                    parts.append((event.type.rpartition(".")[2], event.item_id[:2], event.part.type, event.part.text))
                reasoning += event.delta if event.type == "response.reasoning_text.delta" else ""
                items += [(event.output_index, event.item.type)] if event.type == "response.output_item.done" else []
            final = await stream.get_final_response()
        assert (reasoning, items) == ("I look.", [(0, "reasoning"), (1, "message")])
        for usage in (whole.usage, final.usage):
            assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
        # Its client for Node has no place for reasoning of a part that was not added.
        assert parts == [
            ("added", "rs", "reasoning_text", ""), ("done", "rs", "reasoning_text", "I look."),
            ("added", "ms", "output_text", ""), ("done", "ms", "output_text", "A fox."),
        ]  # fmt: skip
        again = await client.responses.create(
            **{**ask, "input": [{"role": "user", "content": "a fox"}, *final.output, {"role": "user", "content": "on"}]}
        )
        assert again.output_text == "A fox."
        assert final.output_text == "A fox." and final.output[0].content[0].text == "I look."


def test_reasoning_is_kept_where_no_message_follows_it():
    def thought(text: str) -> dict:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    nothing = {"type": "reasoning", "summary": []}  # 25,000 behind 500 kB of reasoning had taken seconds to read
    items = [user, thought("x"), nothing, thought("y"), answer, thought("z"), user, thought("w"), nothing]
    messages = read_response({"input": items}).requests[0].messages.messages
    assert [(message.role, message.reasoning, message.content) for message in messages] == [
        ("user", "", "a"), ("assistant", "x\ny", "b"), ("assistant", "z", ""), ("user", "", "a"), ("assistant", "w", ""),
    ]  # fmt: skip


CALL = '<tool_call>{"name": "find", "arguments": {"text": "fox"}}</tool_call>'
FIND = {
    "type": "function", "name": "find", "strict": None,
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
}  # fmt: skip
TOOLS = {"model": "fake", "input": "a fox", "max_output_tokens": 400, "tools": [FIND]}


def told(output) -> list[tuple]:
    return [(x.type, x.name, json.loads(x.arguments)) if x.type == "function_call" else (x.type,) for x in output]


async def test_calls_are_items_and_so_are_their_outputs(saying):
    said = f"<think>\nI look.\n</think>\n\nOne moment.\n{CALL}\n{CALL}"
    call = ("function_call", "find", {"text": "fox"})
    async with saying(said, http="127.0.0.1:0") as c, openai_client(c) as client:
        whole = await client.responses.create(**TOOLS)
        assert told(whole.output) == [("reasoning",), ("message",), call, call] and whole.status == "completed"
        async with client.responses.stream(**TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert told(final.output) == told(whole.output) and final.output_text == "One moment."
        ends = [event for event in events if event.type == "response.output_item.done"]
        assert [(each.output_index, each.item.id, each.item.status) for each in ends] == [
            (index, item.id, "completed") for index, item in enumerate(final.output)
        ]
        ids = [item.call_id for item in final.output[2:]]
        assert len({item.id for item in final.output}) == 4 and len(set(ids)) == 2
        deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
        for index in (2, 3):
            parts = [event.delta for event in deltas if event.output_index == index]
            assert json.loads("".join(parts)) == {"text": "fox"} and len(parts) > 2
        outputs = [{"type": "function_call_output", "call_id": call_id, "output": "here"} for call_id in ids]
        user = {"role": "user", "content": "a fox"}
        again = await client.responses.create(**{**TOOLS, "input": [user, *final.output, *outputs]})
        assert again.output_text == "One moment."
        asked = [m.spec for kind, m in c.prefill[0].commands if kind == "prefill"][-1]
        prompt = c.pipeline.text.detokenizer.decode(asked.token_ids[: asked.num_prompt_tokens])
        assert prompt.endswith(
            "One moment." + '{"name": "find", "arguments": {"text": "fox"}}' * 2 + "<|tool|>here" * 2
        )


async def test_input_tokens_are_those_of_the_answer_s_usage(saying):
    async with saying(CALL, http="127.0.0.1:0") as c, openai_client(c) as client:
        asked = {"model": "fake", "input": "a fox", "instructions": "be brief", "tools": [FIND], "tool_choice": "auto"}
        counted = await client.responses.input_tokens.count(**asked, reasoning={"effort": "low"}, truncation="disabled")
        assert counted.object == "response.input_tokens"
        usage = (await client.responses.create(**asked, reasoning={"effort": "low"}, max_output_tokens=400)).usage
        assert counted.input_tokens == usage.input_tokens > 5
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.input_tokens.count(**{**asked, "input": [{"role": "robot", "content": "x"}]})
        assert error.value.param == "input[0].role"


async def test_an_effort_to_reason_reaches_the_template(cluster, folder, tmp_path):
    shutil.copytree(folder, model := tmp_path / "fake")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] += "{% if enable_thinking %}{{ 'Reasoning: ' + reasoning_effort }}{% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    async with cluster(model=model, http="127.0.0.1:0") as c, openai_client(c) as client:
        for effort, behind in (("none", ""), ("high", "Reasoning: high"), (None, "")):
            asked = {"reasoning_effort": effort} if effort else {}
            await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=2, **asked
            )
            said = await client.responses.create(
                model="fake", input="hi", max_output_tokens=2, reasoning={"effort": effort}
            )
            assert said.reasoning.effort == effort
            for spec in [m.spec for kind, m in c.prefill[0].commands if kind == "prefill"][-2:]:
                prompt = c.pipeline.text.detokenizer.decode(spec.token_ids[: spec.num_prompt_tokens])
                assert prompt == f"hi{behind}"


async def test_a_call_alone_is_the_only_item(saying):
    async with saying(CALL, http="127.0.0.1:0") as c, openai_client(c) as client:
        assert [item.type for item in (await client.responses.create(**TOOLS)).output] == ["function_call"]
        async with client.responses.stream(**TOOLS, include=["message.output_text.logprobs"]) as stream:
            assert [item.type for item in (await stream.get_final_response()).output] == ["function_call"]


async def test_a_call_that_is_cut_off_is_incomplete(saying):
    async with saying(f"So: {CALL[:-20]}", http="127.0.0.1:0") as c, openai_client(c) as client:
        tools = {**TOOLS, "max_output_tokens": len(c.workers[0].script)}
        *_, last = [event async for event in await client.responses.create(**tools, stream=True)]
        assert [(item.type, item.status) for item in last.response.output] == [
            ("message", "completed"),
            ("function_call", "incomplete"),
        ]
        assert [item.type for item in (await client.responses.create(**tools)).output] == ["message"]
        async with client.responses.stream(**TOOLS) as stream:  # the model itself leaves it so
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["message", "function_call", "message"]
        whole = await client.responses.create(**TOOLS)
        assert whole.output_text == f"So: {CALL[:-20]}" and [item.type for item in whole.output] == ["message"]


async def test_choices_of_tools(saying, capable):
    async with saying(f"So: {CALL}{CALL}", http="127.0.0.1:0") as c, openai_client(c) as client:
        for fields, num_calls in (
            ({"tool_choice": "none"}, 0),
            ({"parallel_tool_calls": False}, 1),
            ({"tool_choice": "auto"}, 2),
        ):
            said = await client.responses.create(**TOOLS, **fields)
            assert len([item for item in said.output if item.type == "function_call"]) == num_calls
        for choice in ("required", {"type": "function", "name": "find"}, "auto"):
            await client.responses.create(**{**TOOLS, "tools": [{**FIND, "strict": True}]}, tool_choice=choice)
            spec = [m.spec for kind, m in c.prefill[0].commands if kind == "prefill"][-1]
            assert "find" in spec.constraint.grammar


class Fox(BaseModel):
    legs: int


async def test_a_format_is_a_constraint(saying, capable):
    async with saying('{"legs": 4}', tool_call_parser="none", http="127.0.0.1:0") as c, openai_client(c) as client:
        parsed = await client.responses.parse(model="fake", input="a fox", max_output_tokens=400, text_format=Fox)
        assert parsed.output_parsed == Fox(legs=4)
        spec = next(m.spec for kind, m in c.prefill[0].commands if kind == "prefill")
        assert json.loads(spec.constraint.json_schema)["properties"]["legs"]["type"] == "integer"


@pytest.mark.parametrize(
    "change, param",
    [
        ({"tools": [FIND, FIND]}, "tools[1].name"),
        ({"tool_choice": {"type": "function", "name": "lose"}}, "tool_choice.name"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0].call_id"),
        (
            {"input": [{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "x", "name": "find", "arguments": "[]"}]},
            "input[1].arguments",
        ),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_tools_is_told_by_its_name(served, change, param):
    async with served() as (_, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{**TOOLS, "instructions": "be brief", **change})
        assert caught.value.param == param


def lines(data: bytes) -> list[dict]:
    return [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]


async def test_arguments_of_the_call_before_come_before_the_text():
    writer = ResponseWriter(
        ParsedBody("resp_1", [pb.GenerateRequest()], {}, stream=True),
        {},
        "fake",
        SimpleNamespace(shown=lambda _: ("", b"")),
    )
    begun = pb.GenerateResponse(tool_calls=[pb.ToolCall(id="a", name="find", arguments='{"n"')])
    more = [pb.ToolCall(arguments=": 1}"), pb.ToolCall(id="b", name="find", arguments="{}")]
    data = writer.chunk(0, begun) + writer.chunk(0, pb.GenerateResponse(text="and", tool_calls=more))
    events = lines(data + await writer.tail([pb.Usage()]))
    assert [(each["output_index"], each["delta"]) for each in events if each["type"].endswith("delta")] == [
        (0, '{"n"'), (0, ": 1}"), (1, "and"), (2, "{}"),
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    assert [(item["type"], item["id"], item["status"]) for item in output] == [
        ("function_call", "fc_1", "completed"), ("message", "msg_1", "completed"), ("function_call", "fc_1_1", "completed"),
    ]  # fmt: skip


class Saying(RequestHandler):
    """Answers every request in these messages."""

    def __init__(self, *messages: pb.GenerateResponse):
        self._messages = messages

    def model(self, asked):
        return SimpleNamespace(name="fake", find=lambda asked: b"")

    def detokenizer(self, asked):
        return SimpleNamespace(shown=lambda token_id: (chr(token_id), chr(token_id).encode()))

    async def generate(self, box, call, emit):
        for message in self._messages:
            await emit(message)


async def outputs(handler: RequestHandler) -> list[list[dict]]:
    """Return the items of an answer in one object, and those that its stream ends with."""
    asked = {"input": "hi", "request_id": "1", "include": [LOGPROBS]}
    whole, stream = (
        AsyncMock(
            values={**asked, "stream": streams},
            has_begun=True,
            context=CallContext(time_left_s=9.0),
            open_stream=Mock(),
        )
        for streams in (False, True)
    )
    await HttpApi(handler).responses(whole)
    await HttpApi(handler).responses(stream)
    ((body,), _), ((events,), _) = whole.reply_json.await_args, stream.end.await_args
    return [json.loads(body)["output"], json.loads(events.decode().strip().splitlines()[-1][6:])["response"]["output"]]


async def test_logprobs_are_of_what_the_message_says_alone():
    def said(tokens: str, **fields) -> pb.GenerateResponse:
        logprobs = [pb.Logprobs(chosen=pb.TokenLogprob(token_id=ord(each), logprob=-1.0)) for each in tokens]
        return pb.GenerateResponse(logprobs=logprobs, **fields)

    call = pb.ToolCall(id="a", name="find", arguments="{}")
    whole, streamed = await outputs(
        Saying(
            said("s"), said("o", reasoning="so"), said("h"), said("i", text="hi"), said("!", text="!"), said("<"),
            said(">", tool_calls=[call]), said("", finish_reason=pb.FINISH_REASON_TOOL_CALLS, usage=pb.Usage()),
        )
    )  # fmt: skip
    assert whole == streamed and [item["type"] for item in whole] == ["reasoning", "message", "function_call"]
    assert [each["token"] for each in whole[1]["content"][0]["logprobs"]] == ["h", "i", "!"]


async def test_a_stream_tells_logprobs_in_deltas_and_at_its_end_in_turns_of_the_loop():
    tokens = SimpleNamespace(shown=lambda token_id: (chr(token_id), chr(token_id).encode()))
    writer = ResponseWriter(ParsedBody("resp_1", [pb.GenerateRequest()], {}, stream=True), {}, "fake", tokens)
    logprobs = [pb.Logprobs(chosen=pb.TokenLogprob(token_id=97, logprob=-1.0))] * 1000
    delta, num_turns = await turns(writer.chunk(0, pb.GenerateResponse(text="a" * 1000, logprobs=logprobs)))
    end, num_at_end = await turns(writer.tail([pb.Usage()]))
    assert num_turns > 1000 // 32 - 2 and num_at_end > 1000 // 32 - 2
    *_, said = lines(delta)
    done, part, item, final = lines(end)
    assert [len(each["logprobs"]) for each in (said, done, part["part"], item["item"]["content"][0])] == [1000, 0, 0, 0]
    assert len(final["response"]["output"][0]["content"][0]["logprobs"]) == 1000


async def test_an_answer_that_comes_back_is_as_the_document_has_it():
    writer = ResponseWriter(
        ParsedBody("resp_1", [pb.GenerateRequest()], {}), {}, "fake", SimpleNamespace(shown=lambda _: ("a", b"a"))
    )
    call = pb.ToolCall(id="a", name="find", arguments="{}")
    logprobs = [pb.Logprobs(chosen=pb.TokenLogprob(token_id=1, logprob=-1.0))]
    writer.add(pb.GenerateResponse(reasoning="so"))
    writer.add(pb.GenerateResponse(text="a", logprobs=logprobs, tool_calls=[call]))
    body = {"input": json.loads(await to_bytes_in_turns(writer.whole(), NUM_LEVELS))["output"]}
    paths = json.loads(json.dumps(document()))["paths"]
    schema = paths["/v1/responses"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate(body, schema)
    (message,) = read_response(body).requests[0].messages.messages
    assert (message.reasoning, message.content, message.tool_calls[0].name) == ("so", "a", "find")


def test_a_token_copies_nothing_of_what_was_said_before_it():
    """Of an answer of 480 KB each took 121 us."""
    writer = ResponseWriter(read_response({"input": "hi", "stream": True}), {}, "model", None)
    writer.chunk(0, pb.GenerateResponse(text=1_000_000 * "a"))
    tracemalloc.start()
    writer.chunk(0, pb.GenerateResponse(text="b"))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100_000
    assert writer.whole()["output"][0]["content"][0]["text"] == 1_000_000 * "a" + "b"
