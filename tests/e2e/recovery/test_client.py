"""The client's own resuming, with real processes: one of two gateways is killed in mid-answer, and the caller sees a
pause."""

import asyncio

import pytest

from baton.client import AsyncClient, Client
from baton.v1 import inference_pb2 as pb
from tests.support.client import gather
from tests.support.pace import patience
from tests.support.stack import SLOW_STEPS, Stack

OPTIONS = ("--num-blocks", "160", "--threads", "1")
MAX_TOKENS = 60
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "n": 2, "logprobs": 1},
    "stop": {"temperature": 0.8, "stop": ["\n\n\n\n\n\n"]},
}


@pytest.fixture(scope="module")
def stack(run_stack):
    with run_stack("client", num_gateways=2, options=OPTIONS) as stack:
        yield stack


@pytest.fixture(autouse=True)
def whole_again(stack):
    yield
    for gateway in stack.gateways:
        if not gateway.alive:
            stack.restart(gateway)


def targets(stack: Stack) -> list[str]:
    return [stack.address[gateway.name] for gateway in stack.gateways]


def drawn_gateway(stack: Stack, client: Client | AsyncClient):
    """Return the one that the client asks."""
    return stack.gateways[client._addresses.current()[0]]


def outcome(messages: list[pb.GenerateResponse]) -> tuple:
    reply = gather(messages)  # in shape over the seam too
    return reply.outcome(), reply.usage.prompt_tokens, reply.usage.output_tokens


def test_streams_of_a_killed_gateway(stack, prompts):
    prompt = prompts(80)
    with Client(targets(stack), timeout_s=patience(60)) as client, stack.armed(SLOW_STEPS):
        options = [{"max_tokens": MAX_TOKENS, "ignore_eos": True, **SAMPLINGS[name]} for name in SAMPLINGS]
        streams = [client.stream(prompt, **each) for each in options]
        received = [[next(stream) for _ in range(5)] for stream in streams]
        drawn_gateway(stack, client).kill()
        for stream, messages in zip(streams, received, strict=True):
            messages += stream
            assert stream.num_resumed, "it was not in mid-stream"
        for each, messages in zip(options, received, strict=True):
            undisturbed = list(client.stream(prompt, **{**each, "seed": messages[0].seed}))
            assert outcome(messages) == outcome(undisturbed)


async def test_asyncio_streams_and_whole_answers_of_a_killed_gateway(stack, prompts):
    prompt, options = prompts(60), {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.9, "seed": 5}
    async with AsyncClient(targets(stack), timeout_s=patience(60)) as client:
        with stack.armed(SLOW_STEPS):
            whole = asyncio.create_task(client.generate(prompt, **options))
            stream = client.stream(prompt, **options)
            messages = [await anext(stream) for _ in range(5)]
            drawn_gateway(stack, client).kill()
            messages += [message async for message in stream]
            answer = await whole
        undisturbed = [message async for message in client.stream(prompt, **options)]
    assert stream.num_resumed and outcome(messages) == outcome(undisturbed)
    assert answer.choices[0].text == gather(undisturbed).text
    assert list(answer.choices[0].token_ids) == gather(undisturbed).token_ids
