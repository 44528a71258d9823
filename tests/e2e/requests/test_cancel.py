"""A client that goes away in any phase leaves nothing behind: all blocks back on both workers, by their ledgers."""

import time

import grpc
import pytest

from tests.support.client import Client, gather, make_request

LONG = {"temperature": 0.0, "max_tokens": 600, "ignore_eos": True}


@pytest.fixture
def idle(probes, slow):
    """Checked before and after: every block is cached or free, on both workers."""
    for probe in probes.values():
        probe.wait_idle()
    yield
    for probe in probes.values():
        probe.wait_idle()


def assert_served(client: Client, prompts) -> None:
    reply = client.generate(prompts(70), temperature=0.0, max_tokens=3, ignore_eos=True)
    assert len(reply.token_ids) == 3


@pytest.mark.parametrize(
    "delay_s",
    [
        0,
        0.005,
        0.04,
        0.3,
        *(pytest.param(each, marks=pytest.mark.long) for each in (0.001, 0.002, 0.01, 0.02, 0.08, 0.15)),
    ],
)
def test_cancel_at_any_phase(client, prompts, idle, delay_s):
    """Sweeps from tokenize through admit, prefill and transfer to decode, whatever the machine's speed."""
    calls = [client.stream(prompts(400), n=n, **LONG) for n in (1, 2)]
    time.sleep(delay_s)
    for call in calls:
        call.cancel()
    assert_served(client, prompts)


@pytest.mark.parametrize("num_messages", [1, 2, 20])
def test_a_cancelled_stream_ends_as_cancelled(client, prompts, idle, num_messages):
    call = client.stream(prompts(100), **LONG)
    for _ in range(num_messages):
        next(call)
    call.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() == grpc.StatusCode.CANCELLED


def test_while_others_go_on(client, prompts, idle):
    """Every other of twelve leaves; the rest is answered as if alone."""
    prompt_ids = [prompts(90) for _ in range(12)]
    fields = {**LONG, "max_tokens": 24}
    alone = [client.generate(ids, **fields).outcome() for ids in prompt_ids[::2]]
    calls = [client.stream(ids, **fields) for ids in prompt_ids]
    for call in calls[1::2]:
        call.cancel()
    assert [gather(call).outcome() for call in calls[::2]] == alone


def test_the_connection_drops(stack, prompts, idle):
    """Not a cancel frame: the whole channel goes."""
    client = Client(stack.target)
    calls = [client.stream(prompts(150), **LONG) for _ in range(4)]
    for call in calls[:2]:
        next(call)
    client.close()


def test_cancel_of_complete(client, prompts, idle):
    for delay_s in (0.01, 0.1):
        future = client.stub.Complete.future(make_request(prompts(200), **LONG))
        time.sleep(delay_s)
        future.cancel()
    assert_served(client, prompts)
