"""A prefill worker whose KV comes to no decode worker, as behind a firewall: requests go elsewhere, and none of them
fails."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.fleet import kv_pair_breakers
from gateway.fleet.kv_pair_breakers import KVPairBreakers
from tests.gateway.calls import PROMPT, ids_of, spend_retries, start
from tests.support.gateway.fake_worker import tokens_of

WARNING = "no KV comes from a worker"


@pytest.fixture
def clock(monkeypatch):
    at = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(kv_pair_breakers, "now", lambda: at.now)
    return at


def link(name: str) -> SimpleNamespace:
    return SimpleNamespace(worker_id=name.encode(), address=name)


async def answer_all(c, num: int) -> None:
    answers = await asyncio.gather(*(start(c) for _ in range(num)))
    assert [ids_of(each) for each in answers] == [tokens_of(PROMPT, 6, 400)] * num


async def test_the_other_prefill_worker_takes_its_requests(cluster, monkeypatch, caplog):
    monkeypatch.setattr(kv_pair_breakers, "_FIRST_PAUSE_S", 1000.0)
    async with cluster(num_prefill=2, split="always") as c:
        bad = c.prefill[0]
        bad.is_cut_off = True
        for _ in range(12):
            await answer_all(c, 10)
        assert 1 <= bad.kinds().count("prefill") <= 10, "those that were on their way at once"
        assert spend_retries(c.pipeline.retry_throttle) == 100
    assert caplog.text.count(WARNING) == 1


async def test_a_pair_that_is_all_there_is(cluster):
    """Where the decode worker may not read prompts itself it is asked again, and whether the gateway is ready is not
    said by that."""
    async with cluster(num_prefill=1, split="always") as c:
        c.decode[0].failures["fetch"] = [(14, "KV_TRANSFER_FAILED")]
        await answer_all(c, 1)
        assert c.prefill[0].kinds().count("prefill") == 2
        assert c.gateway.registry.not_ready() is None
        await answer_all(c, 3)
        assert c.prefill[0].kinds().count("prefill") == 5


def test_one_request_tries_a_pair_whose_pause_is_over(clock, caplog):
    breakers, source, taker = KVPairBreakers(), link("p"), link("d")

    def is_open() -> bool:
        return list(breakers.open_for(b"d", clock.now)) == [b"p"]

    breakers.note_fetch_started(source, taker, clock.now)
    breakers.note_fetch_done(source, taker)
    assert not is_open()
    for pause_s in (5, 10, 20, 40, 80, 160, 300, 300):
        assert breakers.note_fetch_failed(source, taker, "cut off") == (pause_s == 5)
        breakers.note_fetch_started(source, taker, clock.now - 1)
        assert breakers.note_fetch_failed(source, taker, "one that was on its way")
        clock.now += pause_s - 1
        assert is_open() and not breakers.open_for(b"e", clock.now)
        clock.now += 1
        assert not is_open()
        breakers.note_fetch_started(source, taker, clock.now)
        clock.now += 29
        assert is_open(), "while that one tries it"
    assert caplog.text.count(WARNING) == 8
    breakers.note_fetch_done(source, taker)
    assert not is_open() and not breakers._open
    breakers.note_fetch_failed(source, taker, "cut off")
    clock.now += 5
    assert not is_open(), "the first pause again"


def test_a_try_that_comes_to_no_end_is_followed_by_another(clock):
    breakers, source, taker = KVPairBreakers(), link("p"), link("d")
    breakers.note_fetch_failed(source, taker, "cut off")
    clock.now += 5
    breakers.note_fetch_started(source, taker, clock.now)
    clock.now += 30
    assert not breakers.open_for(b"d", clock.now)


async def test_what_fetches_nothing_is_no_try(cluster, monkeypatch):
    """One that was refused by decode workers without room used up the try of each."""
    monkeypatch.setattr(kv_pair_breakers, "_FIRST_PAUSE_S", 0.0)
    async with cluster(num_prefill=1, split="always") as c:
        registry, worker = c.gateway.registry, c.decode[0]
        breakers, (source,), (taker,) = (
            registry.fleets[0].candidates.kv_pair_breakers,
            registry.prefill,
            registry.decode,
        )

        def is_open() -> bool:
            return bool(breakers.open_for(taker.worker_id, kv_pair_breakers.now()))

        breakers.note_fetch_failed(source, taker, "cut off")
        worker.hold("admit")
        worker.hold("fetch")
        answering = asyncio.create_task(answer_all(c, 1))
        await c.until(lambda: "admit" in worker.kinds())
        assert not is_open()
        worker.release("admit")
        await c.until(lambda: "fetch" in worker.kinds())
        assert is_open()
        worker.release("fetch")
        await answering
        assert not breakers.any_open


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_pairs_of_a_worker_that_is_gone_are_forgotten(cluster, role):
    async with cluster(num_prefill=1, split="always") as c:
        c.decode[0].failures["fetch"] = [(14, "KV_TRANSFER_FAILED")]
        await answer_all(c, 1)
        breakers = c.gateway.registry.fleets[0].candidates.kv_pair_breakers
        source, taker = c.gateway.registry.prefill[0], c.gateway.registry.decode[0]
        breakers.note_fetch_failed(source, taker, "cut off")
        assert breakers.any_open
        await getattr(c, role)[0].stop()
        await c.until(lambda: not breakers.any_open)
