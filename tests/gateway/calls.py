"""Calls of a gateway between FakeWorkers, the gates of these at which they wait, and the gateway's own bounds."""

import asyncio
from pathlib import Path

import grpc
import pytest

from baton.service.errors import Unavailable
from baton.v1 import inference_pb2 as pb
from gateway.attempts.retry_throttle import RetryThrottle
from tests.support.client import Refused, gather, make_request, read_error
from tests.support.pace import patience

PROMPT = list(range(20, 320))
GATES = {"admit": "decode", "accept": "prefill", "prefill": "prefill", "fetch": "decode", "decode": "decode"}


async def read(call) -> list[pb.GenerateResponse]:
    return [message async for message in call]


def ids_of(messages, index=0) -> list[int]:
    return [token_id for message in messages if message.index == index for token_id in message.token_ids]


async def generate(c, prompt=PROMPT, **fields):
    return await read(c.stub.Generate(make_request(prompt, **fields), timeout=patience(20)))


def hold(c, gate: str) -> None:
    for worker in getattr(c, GATES[gate]):
        worker.hold(gate)


def release(c, gate: str) -> None:
    for worker in c.workers:
        worker.release(gate)


async def wait_for_gate(c, gate: str) -> None:
    """The request waits at the gate."""
    command = {"admit": "admit", "accept": "prefill", "prefill": "prefill", "fetch": "fetch", "decode": "start"}[gate]
    await c.until(lambda: any(command in worker.kinds() for worker in c.workers))


async def expect_refusal(call) -> Refused:
    """Return the error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return read_error(caught.value)


def start(c, **fields):
    return asyncio.create_task(generate(c, **{"max_tokens": 6, **fields}))


def holder(c, role: str):
    return next(worker for worker in getattr(c, role) if worker.held or worker.kinds())


def spend_retries(throttle: RetryThrottle) -> int:
    """Use up all retries of a gateway, and return how many there were."""
    num = 0
    with pytest.raises(Unavailable) as caught:
        while True:
            throttle.spend(Unavailable("lost", 1.0, reason="DECODE_WORKER_LOST"))
            num += 1
    assert caught.value.reason == "RETRY_BUDGET"
    return num


async def over_grpc(c, prompt, **fields):
    """Return the reply to a call of gRPC: what other protocols' answers are compared with."""
    return gather(await read(c.stub.Generate(make_request(prompt, **fields), timeout=patience(20))))


def write_quotas(folder: Path, text: str) -> Path:
    path = folder / "quotas.toml"
    path.write_text(text)
    return path
