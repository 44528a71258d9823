"""While no worker of a role serves, those of the other do its work: nothing fails, no token is lost or repeated."""

import grpc
import pytest

from tests.gateway.calls import PROMPT, expect_refusal, generate, hold, ids_of, release, start, wait_for_gate
from tests.gateway.pooling.embed_calls import IDS, embed, expected, vectors
from tests.support.client import make_request
from tests.support.gateway.fake_worker import tokens_of
from tests.support.pace import patience


async def stop_all(c, role: str) -> None:
    for worker in getattr(c, role):
        await worker.stop()
        c.workers.remove(worker)
    await c.until(lambda: not any(link.is_serving for link in getattr(c.gateway.registry, role)))


@pytest.mark.parametrize("split", ["auto", "always", "never"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_role_without_workers(cluster, role, split):
    async with cluster(stand_in=True, split=split) as c:
        await stop_all(c, role)
        assert c.gateway.registry.not_ready() is None
        assert ids_of(await generate(c, max_tokens=6)) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_both_roles_without_workers(cluster):
    async with cluster(stand_in=True, max_start_wait_s=0) as c:
        await stop_all(c, "prefill")
        await stop_all(c, "decode")
        assert "no decode worker serves" in c.gateway.registry.not_ready()
        assert (await expect_refusal(start(c))).reason == "NO_WORKER"


@pytest.mark.parametrize("gate", ["admit", "prefill", "fetch", "decode"])
async def test_the_only_decode_worker_dies(cluster, gate):
    async with cluster(stand_in=True) as c:
        hold(c, gate)
        running = start(c)
        await wait_for_gate(c, gate)
        (dead,) = c.decode
        await dead.stop()
        c.workers.remove(dead)
        release(c, gate)
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        await c.idle()


@pytest.mark.parametrize("gate", ["accept", "prefill", "fetch"])
async def test_the_only_prefill_worker_dies(cluster, gate):
    async with cluster(stand_in=True) as c:
        hold(c, gate)
        running = start(c)
        await wait_for_gate(c, gate)
        (dead,) = c.prefill
        await dead.stop()
        c.workers.remove(dead)
        release(c, gate)
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_a_stand_in_dies_in_mid_stream_when_the_decode_worker_is_back(cluster):
    async with cluster(stand_in=True) as c:
        (decode,), (prefill,) = c.decode, c.prefill
        await decode.stop()
        await c.until(lambda: not c.gateway.registry.decode[0].is_serving)
        prefill.holds_at = 100
        call = c.stub.Generate(make_request(PROMPT, max_tokens=200), timeout=patience(20))
        messages = [await call.read() for _ in range(5)]
        decode.hello.epoch = decode.epoch = 7
        await decode.start(decode.port)
        await c.until(lambda: c.gateway.registry.decode[0].is_serving)
        await prefill.stop()
        c.workers.remove(prefill)
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert ids_of(messages) == tokens_of(PROMPT, 200, 400)
        await c.idle()


async def test_a_stand_in_without_room_lets_requests_wait(cluster):
    async with cluster(stand_in=True) as c:
        await stop_all(c, "decode")
        c.prefill[0].refusals = ["no_blocks"] * 3
        assert ids_of(await generate(c, max_tokens=6)) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_a_client_resumes_on_a_stand_in(cluster):
    async with cluster(stand_in=True) as c:
        await stop_all(c, "decode")
        c.decode[:] = c.prefill  # they have the sequence
        c.park("again", PROMPT, 6, 3)
        messages = await generate(c, max_tokens=6, request_id="again", seed=3, resume_from=[2])
        assert ids_of(messages) == tokens_of(PROMPT, 6, 400)[2:]
        assert "attach" in c.prefill[0].kinds()
        await c.idle()


async def test_a_decode_worker_reads_for_vectors(cluster):
    async with cluster(stand_in=True) as c:
        await stop_all(c, "prefill")
        assert vectors(await embed(c, *IDS)) == [expected(ids) for ids in IDS]
        await c.idle()


async def test_without_it_a_role_without_workers_serves_nothing(cluster):
    async with cluster(max_start_wait_s=0) as c:
        await stop_all(c, "decode")
        assert c.gateway.registry.not_ready().startswith("no decode worker serves")
        assert (await expect_refusal(start(c))).reason == "NO_WORKER"
