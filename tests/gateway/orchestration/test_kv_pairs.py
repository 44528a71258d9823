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

    pairs.note_try(source, taker)
    pairs.note_arrival(source, taker)
    assert not left()
    for pause_s in (5, 10, 20, 40, 80, 160, 300, 300):
        assert pairs.note_failure(source, taker, "cut off") == (pause_s == 5)
        assert pairs.note_failure(source, taker, "one that was on its way")
        clock.now += pause_s - 1
        assert left() and not pairs.left_by(b"e", clock.now)
        clock.now += 1
        assert not left()
        pairs.note_try(source, taker)
        assert left(), "while that one tries it"
    assert caplog.text.count(WARNING) == 8
    pairs.note_arrival(source, taker)
    assert not left() and not pairs._left
    pairs.note_failure(source, taker, "cut off")
    clock.now += 5
    assert not left(), "the first pause again"


def test_pairs_of_workers_that_are_gone_are_forgotten(monkeypatch):
    monkeypatch.setattr(kv_pairs, "_MAX_PAIRS", 10)
    pairs = KVPairs()
    for number in range(40):
        pairs.note_failure(link(f"p{number % 2}"), link(f"d{number // 2}"), "cut off")
    assert len(pairs._left) == 5
