"""What a request leaves behind is given back when it has ended, however it has, and waits for no collector."""

import asyncio
import gc

import grpc
import pytest

import gateway.orchestration.pipeline
from gateway.attempts.attempt import Attempt
from gateway.link.mailbox import Mailbox
from gateway.orchestration.machine import RequestMachine
from gateway.orchestration.request_context import RequestContext
from gateway.text.templates import ChatMessage
from tests.gateway.calls import PROMPT, generate, read
from tests.support.client import make_request
from tests.support.pace import patience


@pytest.fixture
def left(monkeypatch):
    """Return what counts the machines, contexts and attempts of requests that are still there; the collector is off."""
    made = []

    def counted(request) -> RequestMachine:
        made.append(True)
        return RequestMachine(request)

    monkeypatch.setattr(gateway.orchestration.pipeline, "RequestMachine", counted)
    gc.collect()
    gc.disable()
    yield lambda: _num_kept() if made else None  # None: no request has come so far
    gc.enable()


async def ended(call) -> grpc.StatusCode:
    try:
        await read(call)
    except asyncio.CancelledError:
        return grpc.StatusCode.CANCELLED
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_an_answered_request_leaves_nothing(cluster, left):
    """A call in gRPC takes 15 KiB or more, and is not given back before the request that writes to it."""
    async with cluster(num_prefill=2, num_decode=2) as c:
        for split in (True, False):
            await generate(c, prompt=PROMPT if split else PROMPT[:10], max_tokens=4)
        await c.until(lambda: left() == 0)


async def test_the_client_has_gone(cluster, left):
    """96 objects, and all that gRPC had of the call."""
    async with cluster() as c:
        c.decode[0].hold("decode")
        call = c.stub.Generate(make_request(PROMPT, max_tokens=6), timeout=patience(20))
        await c.until(lambda: "start" in c.decode[0].kinds())
        call.cancel()
        assert await ended(call) is grpc.StatusCode.CANCELLED
        await c.until(lambda: left() == 0)


async def test_the_deadline_has_passed(cluster, left):
    async with cluster(default_timeout_s=0.3) as c:
        c.prefill[0].hold("prefill")
        assert await ended(c.stub.Generate(make_request(PROMPT))) is grpc.StatusCode.DEADLINE_EXCEEDED
        await c.until(lambda: left() == 0)


async def test_a_refused_request_leaves_nothing(cluster, left):
    async with cluster(max_queued_requests=0) as c:
        c.decode[0].refusals = ["kv_full"] * 100
        assert await ended(c.stub.Generate(make_request(PROMPT))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await c.until(lambda: left() == 0)


async def test_a_call_in_grpc(cluster, left):
    """gRPC's iterator over what a client sends and its call held each other: 400 calls of a busy gateway stayed."""
    gc.collect()
    async with cluster() as c:
        for _ in range(20):
            await generate(c, prompt=PROMPT[:10], max_tokens=2)
        await c.until(lambda: left() == 0)
        assert _num_calls() < 10


async def test_a_conversation_is_not_kept_for_the_length_of_its_answer(cluster, left):
    """Once its prompt is read: its objects were 40 times as large as their text."""
    async with cluster() as c:
        c.decode[0].hold("decode")
        answer = asyncio.create_task(generate(c, prompt=[("user", "the only one")], max_tokens=6))
        await c.until(lambda: "start" in c.decode[0].kinds())
        kept = [
            found for found in gc.get_objects() if isinstance(found, ChatMessage) and found.content == "the only one"
        ]
        c.decode[0].release("decode")
        await answer
        assert not kept


def _num_kept() -> int:
    return sum(isinstance(found, RequestMachine | RequestContext | Attempt) for found in gc.get_objects())


def _num_calls() -> int:
    return sum(type(found).__name__ == "_ServicerContext" for found in gc.get_objects())


def test_a_closed_mailbox_keeps_no_event():
    """An event in a mailbox names its leg, and the leg its mailbox."""
    mailbox = Mailbox()
    mailbox.post(None, "an event")
    mailbox.close()
    assert mailbox.pop() is None
