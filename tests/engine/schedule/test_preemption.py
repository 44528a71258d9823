"""Out of blocks: the last in order is preempted and continues later, with the same answer."""

import random

import pytest

from baton.engine.core.request import Refusal
from baton.engine.kv.ledger import Holder
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.serving import check_answers, random_requests
from tests.support.engine.toy_engine import engine_request, toy_engine, toy_prompt


def growing(count: int, num_tokens: int = 40, max_tokens: int = 150) -> list:
    return [
        engine_request(f"r{i}", toy_prompt(num_tokens + i, i), max_tokens, temperature=1.0, seed=i)
        for i in range(count)
    ]


def test_sequences_that_outgrow_the_pool_are_preempted_and_come_back():
    engine = toy_engine(num_blocks=32, max_model_len=512)
    requests = growing(4)
    records = run_to_end(engine, requests)
    check_answers(records, requests)
    reports = [records[request.key].ended.report for request in requests]
    preempted = [report.num_preemptions for report in reports]
    assert preempted[0] == 0 and sum(preempted) > 0
    assert [report.waits.block_s > 0 for report in reports] == [num > 0 for num in preempted]
    assert all(report.waits.block_s < report.decode_queue_s + report.decode_s for report in reports)
    assert engine.ledger.num_available == 32


def test_what_was_preempted_goes_on_by_a_prefix_hit():
    engine = toy_engine(num_blocks=24, max_model_len=384, max_num_seqs=2)
    requests = growing(2, num_tokens=64, max_tokens=200)
    records = run_to_end(engine, requests)
    check_answers(records, requests)
    assert records[requests[1].key].ended.report.num_preemptions >= 1
    computed = sum(tokens for _, tokens in engine.runner.model.batch_sizes)
    made = sum(len(records[request.key].tokens[0]) + request.num_prompt_tokens for request in requests)
    assert computed < made + 150  # not once more from the start


def test_what_was_preempted_comes_back_where_a_unit_is_left_to_grow_in():
    """Or it would be preempted again some steps later."""
    engine = toy_engine(num_blocks=24, max_model_len=384)
    first, second = growing(2, num_tokens=64)
    records, scheduler, ledger = Collector(), engine.scheduler, engine.ledger
    for request in (first, second):
        engine.submit(request)
    for _ in range(5):
        records.take(engine.step())
    preempted = engine.admission.groups[second.key].trunk
    scheduler.preempt(preempted)
    needed = scheduler.shares.num_to_enter(preempted) + ledger.cache.blocks_per_unit
    taken = ledger.allocate(ledger.num_available - (needed - 1), Holder.LEASED)
    records.take(engine.step())
    assert scheduler.waiting == [preempted]
    ledger.release(taken, Holder.LEASED)
    records.take(engine.step())
    assert preempted in scheduler.running and not scheduler.waiting
    check_answers(run_to_end(engine, collector=records), [first, second])


def test_the_lowest_priority_is_preempted_first():
    engine = toy_engine(num_blocks=24, max_model_len=384, max_num_seqs=2)
    low, high = engine_request("low", toy_prompt(64), 200), engine_request("high", toy_prompt(64, 2), 200, priority=1)
    records = run_to_end(engine, [low, high])
    check_answers(records, [low, high])
    assert records[high.key].ended.report.num_preemptions == 0
    assert records[low.key].ended.report.num_preemptions > 0


def test_choices_are_preempted_one_by_one():
    engine = toy_engine(num_blocks=40, max_model_len=512, max_num_seqs=6)
    requests = [engine_request(f"r{i}", toy_prompt(70, i), 160, n=3, temperature=1.2, seed=i) for i in range(2)]
    records = run_to_end(engine, requests)
    check_answers(records, requests)
    assert sum(records[request.key].ended.report.num_preemptions for request in requests) > 0


def test_one_sequence_may_have_the_whole_pool():
    engine = toy_engine(num_blocks=8, max_model_len=128)
    request = engine_request("a", toy_prompt(60), max_tokens=128 - 60)
    records = run_to_end(engine, [request])
    assert len(records[request.key].tokens[0]) == 128 - 60
    assert records[request.key].ended.report.num_preemptions == 0


def test_a_held_prefill_is_never_preempted():
    engine = toy_engine(num_blocks=16, max_model_len=256, max_num_batched_tokens=68)
    local = engine_request("local", toy_prompt(20), max_tokens=200, priority=1)
    engine.submit(local)
    records = Collector()
    for _ in range(3):
        records.take(engine.step())
    held = engine_request("held", toy_prompt(140, 2))
    engine.admission.accept(held)
    while records[held.key].first is None or records[local.key].ended is None:
        if records[held.key].first is not None and not engine.scheduler.running:
            engine.admission.release_lease(held.key)  # the local one was preempted: only the lease's end lets it go on
        records.take(engine.step())
        engine.check_integrity()
        if held.key in engine.admission.groups:
            assert len(engine.admission.groups[held.key].trunk.blocks.ids) == 9
    check_answers(records, [local])
    assert records[held.key].progress == [64, 128, 140]
    assert records[held.key].ended.error == ""
    assert records[local.key].ended.report.num_preemptions > 0


def test_a_held_prefill_passes_one_that_waits_for_blocks():
    """The other way round each would wait for the other until the lease expires."""
    engine = toy_engine(num_blocks=16, max_model_len=256, max_num_seqs=2)
    local = engine_request("local", toy_prompt(20), max_tokens=220)
    held = engine_request("held", toy_prompt(140, 2))
    engine.submit(local)
    records = Collector()
    records.take(engine.step())
    engine.admission.accept(held)
    engine.scheduler.preempt(engine.admission.groups[local.key].trunk)
    other = engine_request("other", toy_prompt(60, 3))  # takes what is left
    engine.admission.admit(other)
    engine.admission.set_aside(other.key, 60)
    for _ in range(3):
        records.take(engine.step())
        engine.check_integrity()
    assert records[held.key].first is not None
    engine.admission.release_lease(held.key)
    engine.cancel(other.key)
    engine.admission.fetch_settled(other.key)
    check_answers(run_to_end(engine, collector=records), [local])


def test_credit_is_kept_for_those_who_were_admitted():
    """A running sequence is preempted rather than take the blocks of a fetch that was granted."""
    engine = toy_engine(num_blocks=16, max_model_len=256, max_num_seqs=2)
    running = engine_request("running", toy_prompt(60), max_tokens=190)
    engine.submit(running)
    records = Collector()
    records.take(engine.step())
    admitted = engine_request("admitted", toy_prompt(70, 2), max_tokens=8)
    engine.admission.admit(admitted)
    for _ in range(250):
        records.take(engine.step())
        engine.check_integrity()
    assert records[running.key].ended is None and not engine.has_computed
    assert len(engine.admission.set_aside(admitted.key, 70)) == 5
    engine.cancel(admitted.key)
    engine.admission.fetch_settled(admitted.key)
    check_answers(run_to_end(engine, collector=records), [running])


def test_what_waits_gives_way_to_what_is_before_it():
    """A waiting request's promise must not keep the one before it from running."""
    engine = toy_engine(num_blocks=20, max_model_len=256, max_num_seqs=1)
    first, second = engine_request("first", toy_prompt(100), 150), engine_request("second", toy_prompt(60, 2), 60)
    records = run_to_end(engine, [first, second])
    check_answers(records, [first, second])


def test_what_was_promised_runs_past_one_that_cannot_be_helped():
    """Taking the promise of the one behind would not make room enough: it is left alone."""
    engine = toy_engine(num_blocks=20, max_model_len=256)
    held, long = engine_request("held", toy_prompt(128)), engine_request("long", toy_prompt(60, 2), max_tokens=190)
    short = engine_request("short", toy_prompt(20, 3), max_tokens=10)
    engine.submit(long)
    records = Collector()
    for _ in range(140):  # 13 blocks
        records.take(engine.step())
    engine.admission.park(long.key)
    records.take(engine.step())
    engine.admission.accept(held)
    engine.admission.admit(short, fetches=False)
    engine.admission.resume(long.key)
    for _ in range(5):
        records.take(engine.step())
    assert engine.scheduler.waiting and not engine.scheduler.running
    engine.admission.compute_rest(short.key)
    for _ in range(10):
        records.take(engine.step())
        engine.check_integrity()
    check_answers(records, [short])
    assert records[long.key].ended is None
    engine.admission.release_lease(held.key)
    check_answers(run_to_end(engine, collector=records), [long])


class Flood:
    """Short requests, as many as are admitted at a time, without end."""

    def __init__(self, engine, records: Collector, **options):
        self.engine, self.records, self.options = engine, records, options
        self.requests: list = []

    def submit(self) -> None:
        while True:
            index = len(self.requests)
            request = engine_request(
                f"s{index}", toy_prompt(20 + index % 21, index), 8 + index * 7 % 23, **self.options
            )
            try:
                self.engine.submit(request)
            except Refusal as refused:
                assert refused.reason == "kv_full"
                assert not self.engine.admission.shares.is_short, "who is alone is owed nothing"
                return
            self.requests.append(request)

    def steps(self, num: int, until=lambda: False) -> None:
        for _ in range(num):
            if until():
                return
            self.submit()
            self.records.take(self.engine.step())
            self.engine.check_integrity()


def beside_a_flood(long, **options) -> tuple[Flood, Collector]:
    """`long` was parked, came back, and has waited for blocks since, as a flood has them all."""
    engine, records = toy_engine(num_blocks=32, max_num_seqs=16, max_model_len=512), Collector()
    engine.submit(long)
    while records[long.key].first is None:
        records.take(engine.step())
    engine.admission.park(long.key)
    flood = Flood(engine, records, **options)
    flood.steps(10)
    engine.admission.resume(long.key)
    return flood, records


@pytest.mark.parametrize("num_tokens", [150, 440])
def test_what_waits_for_blocks_is_not_passed_for_good_by_new_requests(num_tokens):
    """These take the few that are free each time, of the many that it needs at a time. Of 500 tokens it needs the whole
    pool."""
    long = engine_request("long", toy_prompt(num_tokens), 60)
    flood, records = beside_a_flood(long)
    flood.steps(500, lambda: records[long.key].ended)
    check_answers(records, [long])
    assert not records[long.key].ended.report.num_preemptions
    run_to_end(flood.engine, collector=records)
    check_answers(records, flood.requests)


def test_nothing_is_kept_for_what_has_ended():
    long = engine_request("long", toy_prompt(440), 60)
    flood, records = beside_a_flood(long)
    flood.steps(200, lambda: not flood.engine.scheduler.running)
    flood.engine.cancel(long.key)
    flood.engine.step()
    num_before = len(flood.requests)
    flood.submit()
    assert len(flood.requests) - num_before >= 6
    run_to_end(flood.engine, collector=records)
    check_answers(records, flood.requests)


@pytest.mark.parametrize("seed", range(12))
def test_random_load_on_a_small_pool(seed):
    chance = random.Random(seed)
    block_size = chance.choice([16, 32, 64])
    engine = toy_engine(
        block_size=block_size,
        num_blocks=512 // block_size,
        max_num_seqs=chance.choice([2, 4, 6]),
        max_num_batched_tokens=chance.choice([70, 100, 200]),
    )
    records, requests = Collector(), random_requests(chance, seed, 14)
    for request in requests:
        while True:
            try:
                engine.submit(request)
                break
            except Refusal:
                assert engine.has_work()
                records.take(engine.step())
                engine.check_integrity()
        for _ in range(chance.randint(0, 20)):
            records.take(engine.step())
            engine.check_integrity()
    check_answers(run_to_end(engine, collector=records), requests)
    assert engine.ledger.num_available == engine.num_blocks and engine.ledger.num_reserved == 0
