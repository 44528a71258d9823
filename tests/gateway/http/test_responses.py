"""The Responses API by OpenAI's own client, against what the gRPC door says of the same request."""

import openai
import pytest

from tests.gateway.http.conftest import openai_client
from tests.gateway.http.test_openai_client import over_grpc

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
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
    ],
)
async def test_what_is_refused_is_named(served, change, param):
    async with served() as (_, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{**ASK, **change})
        assert caught.value.param == param


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
        reasoning, items = "", []
        async with client.responses.stream(**ask) as stream:
            async for event in stream:
                reasoning += event.delta if event.type == "response.reasoning_text.delta" else ""
                items += [(event.output_index, event.item.type)] if event.type == "response.output_item.done" else []
            final = await stream.get_final_response()
        assert (reasoning, items) == ("I look.", [(0, "reasoning"), (1, "message")])
        again = await client.responses.create(
            **{**ask, "input": [{"role": "user", "content": "a fox"}, *final.output, {"role": "user", "content": "on"}]}
        )
        assert again.output_text == "A fox."
        assert final.output_text == "A fox." and final.output[0].content[0].text == "I look."
