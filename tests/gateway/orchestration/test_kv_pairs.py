"""A prefill worker whose KV comes to no decode worker, as behind a firewall: requests go elsewhere, and none of them fails."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.fleet import kv_pairs
from gateway.fleet.kv_pairs import KVPairs
from tests.gateway.orchestration.test_answers import PROMPT, ids_of
from tests.gateway.orchestration.test_endings import start
from tests.gateway.orchestration.test_retry_budget import num_left
from tests.support.gateway.fake_worker import tokens_of

WARNING = "no KV comes from a worker"


@pytest.fixture
def clock(monkeypatch):
    at = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(kv_pairs, "now", lambda: at.now)
    return at


def link(name: str) -> SimpleNamespace:
    return SimpleNamespace(worker_id=name.encode(), address=name)


async def answer_all(c, num: int) -> None:
    answers = await asyncio.gather(*(start(c) for _ in range(num)))
    assert [ids_of(each) for each in answers] == [tokens_of(PROMPT, 6, 400)] * num


async def test_the_other_prefill_worker_takes_its_requests(cluster, monkeypatch, caplog):
    monkeypatch.setattr(kv_pairs, "_FIRST_PAUSE_S", 1000.0)
    async with cluster(num_prefill=2, split="always") as c:
        bad = c.prefill[0]
        bad.is_cut_off = True
        for _ in range(12):
            await answer_all(c, 10)
        assert 1 <= bad.kinds().count("prefill") <= 10, "those that were on their way at once"
        assert num_left(c.pipeline.retry_budget) == 100
    assert caplog.text.count(WARNING) == 1


async def test_a_pair_that_is_all_there_is(cluster):
    """Where the decode worker may not read prompts itself it is asked again, and whether the gateway is ready is not said by that."""
    async with cluster(num_prefill=1, split="always") as c:
        c.decode[0].failures["fetch"] = [(14, "KV_TRANSFER_FAILED")]
        await answer_all(c, 1)
        assert c.prefill[0].kinds().count("prefill") == 2
        assert c.gateway.registry.not_ready() is None
        await answer_all(c, 3)
        assert c.prefill[0].kinds().count("prefill") == 5


def test_one_request_tries_a_pair_that_was_left(clock, caplog):
    pairs, source, taker = KVPairs(), link("p"), link("d")

    def left() -> bool:
        return list(pairs.left_by(b"d", clock.now)) == [b"p"]

    pairs.note_fetch(source, taker, clock.now)
    pairs.note_arrival(source, taker)
    assert not left()
    for pause_s in (5, 10, 20, 40, 80, 160, 300, 300):
        assert pairs.note_failure(source, taker, "cut off") == (pause_s == 5)
        pairs.note_fetch(source, taker, clock.now - 1)
        assert pairs.note_failure(source, taker, "one that was on its way")
        clock.now += pause_s - 1
        assert left() and not pairs.left_by(b"e", clock.now)
        clock.now += 1
        assert not left()
        pairs.note_fetch(source, taker, clock.now)
        clock.now += 29
        assert left(), "while that one tries it"
    assert caplog.text.count(WARNING) == 8
    pairs.note_arrival(source, taker)
    assert not left() and not pairs._left
    pairs.note_failure(source, taker, "cut off")
    clock.now += 5
    assert not left(), "the first pause again"


def test_a_try_that_comes_to_no_end_is_followed_by_another(clock):
    pairs, source, taker = KVPairs(), link("p"), link("d")
    pairs.note_failure(source, taker, "cut off")
    clock.now += 5
    pairs.note_fetch(source, taker, clock.now)
    clock.now += 30
    assert not pairs.left_by(b"d", clock.now)


async def test_what_fetches_nothing_is_no_try(cluster, monkeypatch):
    """One that was refused by decode workers without room used up the try of each."""
    monkeypatch.setattr(kv_pairs, "_FIRST_PAUSE_S", 0.0)
    async with cluster(num_prefill=1, split="always") as c:
        registry, worker = c.gateway.registry, c.decode[0]
        pairs, (source,), (taker,) = registry.fleets[0].candidates.kv_pairs, registry.prefill, registry.decode

        def left() -> bool:
            return bool(pairs.left_by(taker.worker_id, kv_pairs.now()))

        pairs.note_failure(source, taker, "cut off")
        worker.hold("admit")
        worker.hold("fetch")
        answering = asyncio.create_task(answer_all(c, 1))
        await c.until(lambda: "admit" in worker.kinds())
        assert not left()
        worker.release("admit")
        await c.until(lambda: "fetch" in worker.kinds())
        assert left()
        worker.release("fetch")
        await answering
        assert not pairs.are_some_left


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_pairs_of_a_worker_that_is_gone_are_forgotten(cluster, role):
    async with cluster(num_prefill=1, split="always") as c:
        c.decode[0].failures["fetch"] = [(14, "KV_TRANSFER_FAILED")]
        await answer_all(c, 1)
        pairs = c.gateway.registry.fleets[0].candidates.kv_pairs
        source, taker = c.gateway.registry.prefill[0], c.gateway.registry.decode[0]
        pairs.note_failure(source, taker, "cut off")
        assert pairs.are_some_left
        await getattr(c, role)[0].stop()
        await c.until(lambda: not pairs.are_some_left)
