"""Gateways on one Redis share the workers of one stack, which serves one model name from one folder, and no others'."""

import shutil
import time

import pytest

from gateway.discovery.redis_directory import NAME
from tests.support.gateway.fake_worker import FakeWorker
from tests.support.gateway.registration import register, serving_addresses
from tests.support.redis_server import RedisServer


@pytest.fixture
def fine_tuned(folder, tmp_path):
    """The folder of a fine-tune: every file that a gateway reads is as in the other one."""
    return shutil.copytree(folder, tmp_path / folder.name)


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path) as server:
        yield server


async def worker_of(c, digest, identity: bytes) -> FakeWorker:
    """A worker that has registered with this gateway."""
    worker = await FakeWorker("decode", digest, 400, model_identity=identity).start()
    c.workers.append(worker)
    await register(c, worker.address)
    return worker


async def test_no_stack_serves_the_model_of_another_one(cluster, digest, fine_tuned, server, caplog):
    async with cluster(0, 0, redis=server.url) as a, cluster(0, 0, redis=server.url, model=fine_tuned) as b:
        first = await worker_of(a, digest, b"a" * 32)
        await a.until(lambda: serving_addresses(a) == [first.address])
        other = await FakeWorker("decode", digest, 400, model_identity=b"b" * 32).start()
        await b.until(lambda: "1 registered with gateways of another --model" in (b.gateway.registry.not_ready() or ""))
        await b.until(lambda: "no worker is registered that serves here" in caplog.text)
        await register(b, other.address)
        b.workers.append(other)
        await b.until(lambda: serving_addresses(b) == [other.address])
        await first.stop()
        await a.until(lambda: "1 registered with gateways of another" in (a.gateway.registry.not_ready() or ""))
        assert serving_addresses(a) == [] and serving_addresses(b) == [other.address]


async def test_workers_that_older_gateways_wrote_are_counted(cluster, server, caplog):
    """Of which stack they are is not said there."""
    async with cluster(0, 0, redis=server.url) as a:
        server.client.zadd(NAME, {"decode 127.0.0.1:9": time.time() + 50})
        await a.until(
            lambda: "1 registered with gateways of another --model, or" in (a.gateway.registry.not_ready() or "")
        )


async def test_other_stacks_are_no_news_while_a_worker_serves(cluster, digest, fine_tuned, server, caplog):
    """As where workers are named, or the DNS names them: none has to register."""
    async with cluster(0, 0, redis=server.url) as a, cluster(0, 1, redis=server.url, model=fine_tuned) as b:
        await b.until(lambda: len(serving_addresses(b)) == 1)
        first = await worker_of(a, digest, b"a" * 32)
        await a.until(lambda: serving_addresses(a) == [first.address])
        await b.until(lambda: b.gateway.registry.registered._others)
        assert "no worker is registered that serves here" not in caplog.text


async def test_gateways_of_one_stack_go_with_a_change_of_weights(cluster, digest, folder, server, tmp_path):
    """However they name the folder, and wherever the workers have registered."""
    link = tmp_path / "current"
    link.symlink_to(folder)
    async with (
        cluster(0, 0, redis=server.url, model=f"m={folder}") as a,
        cluster(0, 0, redis=server.url, model=f"m={link}") as b,
    ):
        old = await worker_of(a, digest, b"a" * 32)
        await b.until(lambda: serving_addresses(b) == [old.address])
        new = await worker_of(a, digest, b"b" * 32)
        await a.until(lambda: "came first" in "".join(link.reason for link in a.gateway.registry.links))
        await old.stop()
        await b.until(lambda: serving_addresses(a) == serving_addresses(b) == [new.address])


async def test_a_model_that_is_added_beside_another_has_its_own_workers(cluster, digest, folder, fine_tuned, server):
    """Of one tokenizer, so that the names that workers give tell them apart where both are served."""
    both = f"chat={folder},code={fine_tuned}"
    async with (
        cluster(0, 0, redis=server.url, model=both) as a,
        cluster(0, 0, redis=server.url, model=f"chat={folder}") as b,
    ):
        for name in ("code", "chat"):
            worker = await FakeWorker("decode", digest, 400, model_identity=name.encode() * 8).start()
            worker.hello.model.name = name
            a.workers.append(worker)
            await register(a, worker.address)
            await a.until(lambda: len(serving_addresses(a)) == len(a.workers))
        await b.until(lambda: serving_addresses(b) == [a.workers[1].address])
