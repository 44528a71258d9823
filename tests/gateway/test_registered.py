"""Workers that register: with one gateway, by way of Redis with all; those that fall silent are forgotten."""

import grpc
import pytest

from baton.v1 import inference_pb2 as pb
from baton.v1 import worker_pb2, worker_pb2_grpc
from gateway import registered
from gateway.roster import NAME, RedisRoster
from tests.client import read_error
from tests.gateway.fake_worker import FakeWorker
from tests.redis_server import RedisServer


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(registered, "_LOOK_S", 0.02)


def register(c, address: str, role: str = "decode"):
    stub = worker_pb2_grpc.RegistrationStub(c.channel)
    return stub.Register(worker_pb2.RegisterRequest(address=address, role=role))


def serving(c) -> list[str]:
    return [link.address for link in c.gateway.registry.links if link.serving]


async def test_a_worker_that_registers_serves(cluster, digest):
    worker = await FakeWorker("decode", digest, 400).start()
    async with cluster(0, 0) as c:
        c.workers.append(worker)
        assert "none has registered" in c.gateway.registry.not_ready()
        assert (await register(c, worker.address)).ttl_s == registered.TTL_S
        await c.until(lambda: serving(c) == [worker.address])
        await register(c, worker.address)
        answer = await c.stub.Complete(pb.GenerateRequest(text="hello", stopping=pb.Stopping(max_tokens=3)))
        assert answer.usage.output_tokens == 3 and len(c.gateway.registry.links) == 1


async def test_both_roles(cluster, digest):
    workers = [await FakeWorker(role, digest, 400).start() for role in ("prefill", "decode")]
    async with cluster(0, 0) as c:
        c.workers += workers
        for worker in workers:
            await register(c, worker.address, worker.role)
        await c.until(lambda: len(serving(c)) == 2)
        registry = c.gateway.registry
        assert [link.address for link in registry.prefill] == [workers[0].address]


async def test_one_that_falls_silent_is_forgotten_when_its_session_is_gone(cluster, digest, monkeypatch):
    monkeypatch.setattr(registered, "TTL_S", 0.1)
    worker = await FakeWorker("decode", digest, 400).start()
    async with cluster(0, 0) as c:
        c.workers.append(worker)
        await register(c, worker.address)
        await c.until(lambda: serving(c) == [worker.address])
        await c.until(lambda: not c.gateway.registry.registered._until)  # its time is over, and it serves on
        assert serving(c) == [worker.address]
        await worker.stop()
        await c.until(lambda: not c.gateway.registry.links)


@pytest.mark.parametrize(
    ("address", "role", "field"),
    [("127.0.0.1:1", "gateway", "role"), ("nowhere", "decode", "address"), ("127.0.0.1:0", "decode", "address")],
)
async def test_nonsense_is_refused(cluster, address, role, field):
    async with cluster(0, 0) as c:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await register(c, address, role)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in caught.value.details()
        assert not c.gateway.registry.links


async def test_too_many_are_refused(cluster, monkeypatch):
    monkeypatch.setattr(registered, "MAX_WORKERS", 1)
    async with cluster(0, 0) as c:
        await register(c, "127.0.0.1:1")
        await register(c, "127.0.0.1:1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await register(c, "127.0.0.1:2")
        assert read_error(caught.value).reason == "TOO_MANY_WORKERS"


async def test_who_registers_with_one_gateway_is_known_to_all(cluster, digest, tmp_path):
    with RedisServer(tmp_path) as server:
        worker = await FakeWorker("decode", digest, 400).start()
        async with cluster(0, 0, redis=server.url) as c, cluster(0, 0, redis=server.url) as other:
            c.workers.append(worker)
            await register(c, worker.address)
            await other.until(lambda: serving(other) == [worker.address])
            assert server.client.zrange(NAME, 0, -1) == [f"decode {worker.address}".encode()]


async def test_the_roster_forgets_and_trusts_nothing(tmp_path):
    with RedisServer(tmp_path) as server:
        roster = RedisRoster(server.url)
        seconds = server.client.time()[0]
        told = {
            "decode 10.0.0.1:5": seconds - 5,
            "decode 10.0.0.2:5": seconds + 60,
            b"\xff\xfe": seconds + 60,
            "x": seconds + 60,
        }
        server.client.zadd(NAME, told | {"gateway 10.0.0.3:5": seconds + 60})
        assert await roster.exchange({("prefill", "10.0.0.4:5"): 9.5}) == {
            ("decode", "10.0.0.2:5"),
            ("prefill", "10.0.0.4:5"),
        }
        server.client.delete(NAME)
        server.client.set(NAME, "of the wrong kind")
        assert await roster.exchange({("prefill", "10.0.0.4:5"): 9.5}) == set()
        await roster.close()
