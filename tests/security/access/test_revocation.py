"""Keys that are taken away and files of them that are replaced, while streams run (S4, H9)."""

import asyncio
import hashlib
import os
import time

import grpc
import pytest

from baton.service.security.credentials import new_key
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.gateway.conftest import cluster, digest, folder  # noqa: F401
from tests.support.client import gather, make_request
from tests.support.gateway.fake_worker import tokens_of

PROMPT = list(range(20, 60))


class Keys:
    """A file of keys, one a tenant. It is replaced, never written to."""

    def __init__(self, path):
        self.path, self.key = path, {}
        self._tables = {}

    def add(self, tenant: str) -> None:
        self.key[tenant], key_id, digest = new_key()  # noqa: F811
        self._tables[tenant] = f'[keys.{key_id}]\ntenant = "{tenant}"\nsha256 = "{digest}"\n'
        self.write()

    def remove(self, tenant: str) -> None:
        del self._tables[tenant]
        self.write()

    def write(self, content: str | None = None) -> None:
        beside = self.path.with_suffix(".new")
        beside.write_text("".join(self._tables.values()) if content is None else content)
        os.replace(beside, self.path)

    def shown(self, tenant: str) -> tuple:
        return (("authorization", f"Bearer {self.key[tenant]}"),)


@pytest.fixture
def keys(tmp_path) -> Keys:
    keys = Keys(tmp_path / "credentials.toml")
    for tenant in ("acme", "globex"):
        keys.add(tenant)
    return keys


@pytest.fixture
def served(cluster, keys, tmp_path):  # noqa: F811
    (tmp_path / "secret").write_text(hashlib.sha256(b"secret").hexdigest())
    return lambda: cluster(credentials=keys.path, cluster_secret=tmp_path / "secret", split="auto")


async def is_known(c, shown) -> bool:
    """A new call, with this credential."""
    try:
        stub = inference_pb2_grpc.InferenceStub(c.channel)
        await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20, metadata=shown)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        return False
    return True


async def test_a_key_that_is_revoked_ends_no_stream_and_begins_none(served, keys):
    async with served() as c:
        c.decode[0].hold("decode")

        async def read():
            request = make_request(PROMPT, max_tokens=6, temperature=0.0)
            stream = inference_pb2_grpc.InferenceStub(c.channel).Generate(
                request, timeout=60, metadata=keys.shown("acme")
            )
            return gather([message async for message in stream])

        running = [asyncio.create_task(read()) for _ in range(5)]
        await c.until(lambda: c.gateway.handler.num_running == 5)
        keys.remove("acme")
        revoked_at, num_late = time.monotonic(), 0
        while await is_known(c, keys.shown("acme")):
            num_late = num_late + 1 if time.monotonic() > revoked_at + 1 else 0
            assert num_late < 3  # the file is looked at every second, by the call that comes then
            await asyncio.sleep(0.02)
        assert await is_known(c, keys.shown("globex"))
        assert c.gateway.handler.num_running == 5
        c.decode[0].release("decode")
        for reply in await asyncio.gather(*running):
            assert reply.token_ids == tokens_of(PROMPT, 6, 400)


async def test_the_file_is_replaced_under_load(served, keys, caplog):
    """By whole ones with more and fewer keys, and by halves: a tenant that is in all of them is not affected."""
    async with served() as c:
        stop, num_calls = asyncio.Event(), 0

        async def ask() -> None:
            nonlocal num_calls
            while not stop.is_set():
                assert await is_known(c, keys.shown("globex"))
                num_calls += 1

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask()) for _ in range(4)]
            for index in range(2):
                keys.add(f"tenant{index}")
                async with asyncio.timeout(30):
                    while not await is_known(c, keys.shown(f"tenant{index}")):
                        await asyncio.sleep(0.02)
                for half in (keys.path.read_text()[:-9], "", "no table", '[keys.k1]\ntenant = "default"'):
                    keys.write(half)
                    caplog.clear()
                    while "the old ones stay in use" not in caplog.text:
                        await asyncio.sleep(0.01)
                        assert not any(task.done() for task in asking)
                keys.remove(f"tenant{index}")
                async with asyncio.timeout(30):
                    while await is_known(c, keys.shown(f"tenant{index}")):
                        await asyncio.sleep(0.02)
            stop.set()
        assert num_calls > 20
