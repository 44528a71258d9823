"""Seconds by what they were spent waiting for: they add up to the request's, and each goes where it belongs."""

import random

import pytest

from baton.service.observe.bottleneck import BOTTLENECKS, PromptFacts, bottleneck_of
from baton.service.observe.core_wait import LoopDelay, PathDelay
from baton.v1 import worker_pb2
from gateway.observe.recent_requests import RecentRequests
from gateway.request.bottlenecks import seconds_by_bottleneck
from gateway.request.timing import Measured, Stamps, breakdown
from tests.support.gateway.request_records import ANSWERED, record

BUSY = PathDelay(LoopDelay(0.0, 0.01))
FOR_A_PLACE, FOR_BLOCKS = worker_pb2.Waits(place_s=7), worker_pb2.Waits(block_s=7)


def stamps(*gaps_s: float) -> Stamps:
    """One that has ended with its last message, phases in order."""
    at, made = 100.0, Stamps(100.0)
    names = ("tokenized", "routed", "granted", "prefill_sent", "first_sent", "second_sent", "last_sent")
    for name, gap_s in zip(names, gaps_s, strict=True):
        at += gap_s
        setattr(made, name, at)
    return made


def drawn(rng: random.Random) -> Measured:
    few = lambda most: rng.choice((0.0, rng.uniform(0, most)))  # noqa: E731
    report = worker_pb2.DecodeReport(kv_wait_s=few(2), decode_queue_s=few(2), first_step_s=few(1), decode_s=few(5))
    path = PathDelay(LoopDelay(few(1), few(1)), few(1))
    report.waits.place_s, report.waits.block_s = few(2), few(2)
    queued_s = {bottleneck: few(2) for bottleneck in ("prefill queue", "decode queue", "kv pool") if rng.random() < 0.5}
    return Measured(
        few(2),
        few(3),
        few(2),
        0.0,
        report,
        rng.random(),
        rng.random(),
        few(4),
        path,
        queued_s,
        few(2),
        few(2),
        rng.random() < 0.5,
    )


def test_they_add_up_to_the_phases():
    rng = random.Random(3)
    for _ in range(2000):
        made = stamps(*(rng.choice((0.0, rng.uniform(0, 3))) for _ in range(7)))
        measured = drawn(rng)
        found, spent = seconds_by_bottleneck(made, measured), breakdown(made, measured)
        assert found.keys() <= set(BOTTLENECKS) and min(found.values(), default=0) >= 0
        assert sum(found.values()) == pytest.approx(sum(spent.values()), abs=1e-9)


@pytest.mark.parametrize(
    "bottleneck, gaps_s, measured",
    [
        ("gateway", (1, 1, 0, 0, 0, 0, 1), Measured(path=BUSY)),
        ("cores", (0, 0, 0, 0, 4, 0, 1), Measured(path=PathDelay(LoopDelay(0.02, 0.01)))),
        ("network", (0, 0, 0, 0, 4, 0, 1), Measured(path=PathDelay(LoopDelay(0.02, 0.01), 0.1))),
        ("cores", (0, 0, 0, 0, 0, 0, 9), Measured(decode_core_wait=0.7)),
        ("cores", (0, 0, 0, 0, 9, 0, 1), Measured(prefill_s=9, prefill_core_wait=0.6)),
        ("prefill compute", (0, 0, 0, 0, 9, 0, 1), Measured(prefill_s=9, prefill_core_wait=0.4)),
        ("prefill queue", (0, 0, 0, 9, 1, 0, 1), Measured(prefill_s=1)),
        ("prefill queue", (0, 0, 0, 0, 9, 0, 1), Measured(queue_s=8, prefill_slot_s=7, is_disaggregated=True)),
        ("decode queue", (0, 0, 0, 0, 9, 0, 1), Measured(queue_s=8, prefill_slot_s=7)),
        ("kv pool", (0, 0, 0, 0, 9, 0, 1), Measured(queue_s=8, prefill_block_s=7)),
        ("kv pool", (0, 4, 4, 0, 1, 0, 1), Measured(queued_s={"kv pool": 8})),
        ("decode queue", (0, 4, 4, 0, 1, 0, 1), Measured(queued_s={"decode queue": 8})),
        ("prefill queue", (0, 0, 0, 9, 1, 0, 1), Measured(queued_s={"prefill queue": 8})),
        ("gateway", (0, 4, 4, 0, 1, 0, 1), Measured(path=BUSY)),
        ("decode queue", (0, 0, 0, 0, 0, 0, 9), Measured(decode=worker_pb2.DecodeReport(decode_s=9, waits=FOR_A_PLACE))),
        ("kv pool", (0, 0, 0, 0, 0, 0, 9), Measured(decode=worker_pb2.DecodeReport(decode_s=9, waits=FOR_BLOCKS))),
        ("transfer", (0, 0, 0, 0, 0, 9, 1), Measured(decode=worker_pb2.DecodeReport(kv_wait_s=8, decode_s=1))),
        ("decode bandwidth", (0, 0, 0, 0, 0, 0, 9), Measured()),
        ("client", (0, 0, 0, 0, 0, 0, 9), Measured(unread_s=8)),
        ("gateway", (0, 0, 0, 0, 0, 0, 9), Measured(decode=worker_pb2.DecodeReport(decode_s=2), path=BUSY)),
    ],
)  # fmt: skip
def test_each_goes_where_it_belongs(bottleneck, gaps_s, measured):
    found = seconds_by_bottleneck(stamps(*gaps_s), measured)
    assert bottleneck_of(found).name == bottleneck, found


def test_a_cold_cache_is_named():
    before, since = PromptFacts(2000, 0.1, 0.6), PromptFacts(2000, 0.5, 0.6)
    cold, warm = (bottleneck_of({"prefill compute": 1.0}, facts).sentence for facts in (before, since))
    assert "cold cache" in cold and "one after the other" in cold
    assert "cold cache" not in warm and "add prefill workers" in warm


def test_caches_before_and_since_a_worker_started():
    started_at = [0.0]
    kept = RecentRequests(lambda: started_at[0])
    for num_cached in (60, 60, 5, 5):
        each = record(**ANSWERED)
        each.num_prompt_tokens, each.num_cached_tokens = 100, num_cached
        each.stamps.received = 1.0 if num_cached == 60 else 9.0
        kept.ended(each, None)
    last = [each.record for each in kept.last]
    assert kept._facts(last) == PromptFacts(67.5, 0.325, 0.0)
    started_at[0] = 5.0
    assert kept._facts(last) == PromptFacts(67.5, 0.05, 0.6)
