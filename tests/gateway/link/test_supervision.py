"""A gateway keeps serving while each of its tasks is killed, three times."""

import asyncio
import logging
import time

import grpc
import pytest

from baton import tasks
from baton.v1 import inference_pb2 as pb
from baton.v1 import worker_pb2, worker_pb2_grpc
from tests.support.gateway.fake_worker import FakeWorker
from tests.support.killing import Killed, kill, our_tasks, waits_for_children
from tests.support.redis_server import RedisServer

SUPERVISED = {
    "readiness", "registered workers", "silence", "event loop watch", "link", "name", "redis heartbeat", "redis writer", "usage",
    "heap", "http date",
}  # fmt: skip
GROUPS = {"registry", "redis"}  # wait for supervised tasks, and do nothing else
REPLACED = {"session writer"}  # its session ends, and its link opens another
FATAL = {"end of the gRPC server"}  # when it ends, so does the process


@pytest.fixture
async def gateway(cluster, digest, tmp_path, monkeypatch):
    """With everything that has tasks; three workers: by address, by name and registered."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.01)
    quotas = tmp_path / "quotas.toml"
    quotas.write_text("[default]\ntokens_per_s = 1000000\nconcurrent_requests = 100\n")
    by_address, by_name, registered = [await FakeWorker("decode", digest, 400).start() for _ in range(3)]
    told = (by_address.address, f"localhost:{by_name.port}")
    with RedisServer(tmp_path) as server:
        async with cluster(0, 0, redis=server.url, quotas=quotas, decode_workers=told) as c:
            c.workers += [by_address, by_name, registered]
            c.server = server
            c.registered = registered
            await register(c)
            await c.until(lambda: len(serving(c)) == 3 and our_tasks().keys() >= SUPERVISED)
            yield c


async def register(c) -> None:
    stub = worker_pb2_grpc.RegistrationStub(c.channel)
    await stub.Register(worker_pb2.RegisterRequest(address=c.registered.address, role="decode"))


def serving(c) -> list[str]:
    return [link.address for link in c.gateway.registry.links if link.is_serving]


async def answered(c) -> None:
    """By a worker, and written into the index."""
    prompt = [10 + int(time.monotonic() * 1000) % 300, *range(10, 329)] * 2
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), stopping=pb.Stopping(max_tokens=3))
    async with asyncio.timeout(10):
        while True:
            try:
                answer = await c.stub.Complete(request)
                break
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:  # all workers were lost a moment ago
                    raise
    assert answer.usage.output_tokens == 3


async def running(c, name: str) -> list[asyncio.Task]:
    """Tasks of that name, once there are any."""
    found: list[asyncio.Task] = []
    await c.until(lambda: found.extend(task for task in asyncio.all_tasks() if task.get_name() == name) or found)
    return found


async def test_every_task_is_in_the_table(gateway):
    await answered(gateway)
    told = SUPERVISED | GROUPS | REPLACED | FATAL
    # A new task: supervise it, and name it here. That of the request may be about to end.
    await gateway.until(lambda: our_tasks().keys() - {"redis lookup"} == told)
    for kind, each in our_tasks().items():
        for task in each:
            is_supervised = task.get_coro().__qualname__ == "supervise"
            assert is_supervised == (kind in SUPERVISED | GROUPS), kind
            assert not is_supervised or waits_for_children(task) == (kind in GROUPS), kind


# What was to wake a task finds that it does not wait any more.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("end", [Killed(), None], ids=["fails", "is cancelled"])
@pytest.mark.parametrize("kind", sorted(SUPERVISED | REPLACED))
async def test_one_that_is_killed_is_there_again(gateway, kind, end, caplog):
    c = gateway
    for _ in range(3):
        for task in our_tasks()[kind]:
            await kill(task, end)
        await register(c)
        await c.until(lambda: len(serving(c)) == 3)
        await answered(c)
        await c.until(lambda: all(not task.done() for task in our_tasks().get(kind, [])) and kind in our_tasks())
        assert c.gateway.registry.not_ready() is None
    assert any(record.levelno >= logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("kind", ["redis heartbeat", "redis writer"])
async def test_the_index_is_written_behind_it(gateway, kind):
    c = gateway
    for task in our_tasks()[kind]:
        await kill(task, None)
    c.server.client.delete("x", *c.server.client.keys("kv:*"))
    await answered(c)
    await c.until(lambda: len(c.server.client.keys("kv:*")) >= 10)


async def test_a_lookup_that_is_killed_is_a_miss(gateway, monkeypatch):
    async def ask(hashes):
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(gateway.gateway.index, "_ask", ask)
    await gateway.until(lambda: gateway.gateway.index._slots.worker_bits.mask)
    asked = asyncio.create_task(gateway.gateway.index.lookup([bytes(32)]))
    (lookup,) = await running(gateway, "redis lookup")
    lookup.cancel()
    assert await asked == {}
