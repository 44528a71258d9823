"""Prompts of one call: how many run at once, and which of those that are refused are served again."""

import asyncio
from unittest.mock import AsyncMock

import pytest
from openai import APIError, BadRequestError, RateLimitError

from baton.service.errors import Overloaded
from baton.v1 import inference_pb2 as pb
from gateway.api.owned_request import OwnedRequest
from gateway.api.request_handler import CallContext, RequestHandler
from gateway.http import app
from gateway.http.fan_out import serve_all
from tests.support.pace import patience

PROMPT = list(range(20, 90))


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_beyond_a_quota_wait_for_each_other(served, tmp_path, stream):
    """Two of two choices each may run, of five that are asked for at once; all at once would be refused each time."""
    path = tmp_path / "quotas.toml"
    path.write_text("[default]\nconcurrent_requests = 4\n")
    async with served(quotas=path) as (_, client):
        ask = {"model": "fake", "prompt": ["a fox"] * 5, "max_tokens": 3, "seed": 3, "n": 2}
        if not stream:
            assert len((await client.completions.create(**ask)).choices) == 10
            return
        chunks = [chunk async for chunk in await client.completions.create(**ask, stream=True)]
        ended = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert sorted(ended) == list(range(10))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_refused_for_others_of_its_call_waits_for_them(served, stream):
    """A batch of 16 prompts of a thousand tokens was refused by what its own prompts would take on a CPU."""
    async with served(max_concurrent_requests=2) as (_, client):
        ask = {"model": "fake", "prompt": [f"fox {n}" for n in range(8)], "max_tokens": 3, "echo": True}
        if stream:
            texts = [""] * 8
            async for chunk in await client.completions.create(**ask, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        else:
            texts = [choice.text for choice in (await client.completions.create(**ask)).choices]
        assert all(text.startswith(prompt) for text, prompt in zip(texts, ask["prompt"], strict=True))
        assert len({*texts}) == 8


async def test_prompts_that_are_refused_alone_end_their_call(served, monkeypatch):
    refused = AsyncMock(side_effect=Overloaded("no place", 1.0, reason="QUEUE_FULL"))
    monkeypatch.setattr(RequestHandler, "generate", refused)
    async with served() as (_, client):
        with pytest.raises(RateLimitError, match="no place"):
            await client.completions.create(model="fake", prompt=["a fox"] * 8)
    assert refused.call_count < 2 * 8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompts", "place", "said"),
    [
        ([[20, 21], [5000, 22]], "prompt[1][0]", "vocabulary"),
        (["a fox", ""], "prompt[1]", "is empty"),
        ([[20], [30], [40] * 2000], "prompt[2]", "too long"),
        ([[20], [30] * 1022, [40]], "prompt[1]", r"1022 \+ 3 > 1024"),
        ([[]], "prompt[0]", "is empty"),
    ],
)
async def test_what_is_wrong_with_one_of_several_prompts_is_told_of_that_one(served, stream, prompts, place, said):
    """A token of the second prompt was `prompt[0]`, and of 128 prompts nobody knew which one was too long."""
    async with served() as (_, client):
        with pytest.raises(BadRequestError, match=said) as error:
            await client.completions.create(model="fake", prompt=prompts, max_tokens=3, stream=stream)
        assert error.value.param == place
        with pytest.raises(BadRequestError) as error:
            await client.completions.create(model="fake", prompt=["a", "b"], temperature=-1, stream=stream)
        assert error.value.param == "temperature"


async def test_log_probabilities_of_all_prompts_are_counted_where_they_are_one_object(served, monkeypatch):
    """Those of a prompt are told once for each choice. 128 prompts could have 128 times as many as one."""
    monkeypatch.setattr(app, "_MAX_LOGPROBS", 3 * (2 * 2 + 2 * 4))
    ask = {"model": "fake", "max_tokens": 4, "n": 2, "logprobs": 0, "echo": True}
    async with served() as (_, client):
        whole = await client.completions.create(**ask, prompt=[[20, 21, 22]] * 3)
        assert [len(choice.logprobs.token_logprobs) for choice in whole.choices] == [7] * 6
        with pytest.raises(BadRequestError, match="send fewer prompts, or stream") as error:
            await client.completions.create(**ask, prompt=[[20, 21, 22]] * 4)
        assert error.value.param == "prompt"
        stream = await client.completions.create(**ask, prompt=[[20, 21, 22]] * 4, stream=True)
        assert {choice.index async for chunk in stream for choice in chunk.choices} == set(range(8))


async def test_a_refusal_that_is_told_late_ends_no_call_whose_others_were_served_meanwhile():
    """With keys refusals are paced. This one passed for that of a prompt alone, and all was thrown away."""
    num_running = 0

    async def serve(prompt: int, context: CallContext) -> int:
        nonlocal num_running
        if num_running:
            for _ in range(20):
                await asyncio.sleep(0)
            raise Overloaded("no place", 1.0, reason="QUEUE_FULL")
        num_running += 1
        await asyncio.sleep(0)
        num_running -= 1
        return prompt

    assert await serve_all(serve, 4, 2, CallContext()) == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_beyond_a_quota_of_tokens_wait_until_it_has_some(served, tmp_path, monkeypatch, stream):
    """What was served of such a call was thrown away, and paid for all the same."""
    serve, num_calls = RequestHandler.generate, 0

    async def generate(*args) -> None:
        nonlocal num_calls
        num_calls += 1
        await serve(*args)

    monkeypatch.setattr(RequestHandler, "generate", generate)
    path = tmp_path / "quotas.toml"
    path.write_text("[default]\ntokens_per_s = 1000\nburst_tokens = 200\n")
    async with served(quotas=path) as (_, client):
        ask = {"model": "fake", "prompt": [PROMPT] * 16, "max_tokens": 10, "seed": 3}
        if stream:
            chunks = [chunk async for chunk in await client.completions.create(**ask, stream=True)]
            ended = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        else:
            ended = [choice.index for choice in (await client.completions.create(**ask)).choices]
        assert sorted(ended) == list(range(16)) and num_calls < 4 * 16


@pytest.mark.parametrize("stream", [False, True])
async def test_of_several_prompts_none_is_kept_once_it_is_answered(served, monkeypatch, stream):
    """Each was, for as long as the longest of their answers took. A stream's may be let go of once it has begun."""
    requests, take, serve, is_first = list[list[OwnedRequest]](), app._take, RequestHandler.generate, True

    def taken(*args):
        requests.append(take(*args))
        return requests[-1]

    async def generate(handler, box, context, emit) -> None:
        nonlocal is_first
        is_held, is_first = is_first, False

        async def told(message: pb.GenerateResponse) -> None:
            await emit(message)
            if is_held and stream:
                assert requests[0][0]._request is None, "something was told of it"

        await serve(handler, box, context, told)
        if not is_held:
            return
        async with asyncio.timeout(patience(10)):
            while any(each._request for each in requests[0][1:]):
                await asyncio.sleep(0.01)

    monkeypatch.setattr(app, "_take", taken)
    monkeypatch.setattr(RequestHandler, "generate", generate)
    async with served() as (_, client):
        ask = {"model": "fake", "prompt": ["a fox", "a dog", "a hen"], "max_tokens": 3}
        if stream:
            assert [chunk async for chunk in await client.completions.create(**ask, stream=True)]
        else:
            assert len((await client.completions.create(**ask)).choices) == 3
    assert [[each._request for each in call] for call in requests] == [[None, None, None]]


@pytest.mark.parametrize("burst_tokens", [10, 200], ids=["none is served", "some are"])
async def test_a_quota_that_lasts_longer_than_the_call_is_not_waited_for(served, tmp_path, burst_tokens):
    path = tmp_path / "quotas.toml"
    path.write_text(f"[default]\ntokens_per_s = 0.001\nburst_tokens = {burst_tokens}\n")
    async with served(quotas=path) as (_, client):
        await client.completions.create(model="fake", prompt=[20] * 9, max_tokens=1)
        with pytest.raises(RateLimitError, match="quota"):
            await client.completions.create(model="fake", prompt=[PROMPT] * 8, max_tokens=10)


async def test_a_quota_is_not_waited_for_before_a_prompt_is_served():
    calls = []

    async def serve(prompt: int, context: CallContext) -> None:
        calls.append(prompt)
        await asyncio.sleep(0)
        raise Overloaded("no tokens", patience(600), reason="TENANT_TOKENS")

    with pytest.raises(Overloaded, match="no tokens"):
        await serve_all(serve, 8, 4, CallContext(patience(3600)))
    assert len(calls) < 8


async def test_after_a_burst_of_refusals_as_many_prompts_run_as_before():
    """They ran one at a time to the end of the call."""
    num_running, seen, num_refusals = 0, list[int](), 3

    async def serve(prompt: int, context: CallContext) -> int:
        nonlocal num_running, num_refusals
        num_running += 1
        try:
            await asyncio.sleep(0)
            if num_refusals:
                num_refusals -= 1
                raise Overloaded("no place", 1.0, reason="QUEUE_FULL")
            seen.append(num_running)
            for _ in range(20):
                await asyncio.sleep(0)
            return prompt
        finally:
            num_running -= 1

    assert await serve_all(serve, 64, 4, CallContext()) == list(range(64))
    assert seen[0] == 1 and max(seen) == seen[-20] == 4


async def test_what_is_refused_once_it_has_said_something_ends_the_call(served, monkeypatch):
    async def generate(handler, box, call, emit) -> None:
        await emit(pb.GenerateResponse(text="a", token_ids=[20]))
        raise Overloaded("too many tokens of this answer are unread", 0.0, reason="SLOW_READER")

    monkeypatch.setattr(RequestHandler, "generate", generate)
    async with served() as (_, client):
        with pytest.raises(APIError, match="unread"):
            async for _ in await client.completions.create(model="fake", prompt=["a", "b"], stream=True):
                pass


async def test_a_completion_of_many_prompts_has_few_of_them_at_once(served, monkeypatch):
    """An evaluation in batches of 64 or 128 was refused."""
    serve, running, most = RequestHandler.generate, 0, 0

    async def generate(*args) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await serve(*args)
        running -= 1

    monkeypatch.setattr(RequestHandler, "generate", generate)
    async with served() as (_, client):
        ask = {"model": "fake", "prompt": [f"fox {n}" for n in range(128)], "max_tokens": 0, "echo": True}
        choices = (await client.completions.create(**ask)).choices
        assert [each.text for each in choices] == ask["prompt"] and most == 32
        with pytest.raises(BadRequestError, match="129 prompts, 1 to 128"):
            await client.completions.create(**{**ask, "prompt": ["a"] * 129})
