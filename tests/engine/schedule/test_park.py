"""A key that is not read parks: no step is computed for it and no block is held; it resumes with the same answer."""

import random
import time

import pytest

from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.serving import check_answers
from tests.support.engine.toy_engine import engine_request, toy_answer, toy_engine, toy_prompt


def begin(engine, request, num_steps: int) -> Collector:
    engine.submit(request)
    records = Collector()
    for _ in range(num_steps):
        records.take(engine.step())
    return records


def finish(engine, records, *requests) -> None:
    for _ in range(2000):
        if all(records[request.key].ended for request in requests):
            return
        records.take(engine.step())
        engine.check_integrity()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_steps", [2, 40, 90])
def test_a_parked_request_goes_on_where_it_was(n, num_steps):
    engine = toy_engine()
    request = engine_request("a", toy_prompt(70), 100, n=n, temperature=1.1, seed=3)
    records = begin(engine, request, num_steps)
    engine.admission.park(request.key)
    for _ in range(3):
        records.take(engine.step())
        engine.check_integrity()
    num_steps = engine.step_number
    assert engine.ledger.num_available == engine.num_blocks and not engine.has_work()
    records.take(engine.step())
    assert engine.step_number == num_steps, "it computed for no reader"
    engine.admission.resume(request.key)
    finish(engine, records, request)
    check_answers(records, [request])


def test_a_parked_request_goes_on_by_a_prefix_hit():
    engine = toy_engine()
    request = engine_request("a", toy_prompt(130), 60)
    records = begin(engine, request, 40)
    engine.admission.park(request.key)
    records.take(engine.step())
    before = sum(tokens for _, tokens in engine.runner.model.batch_sizes)
    engine.admission.resume(request.key)
    records.take(engine.step())
    computed = sum(tokens for _, tokens in engine.runner.model.batch_sizes) - before
    assert computed <= 64 + 16, "whole units were in the cache"
    finish(engine, records, request)
    check_answers(records, [request])


def test_what_was_evicted_meanwhile_is_computed_again():
    engine = toy_engine(num_blocks=24, max_model_len=384)
    request, others = (
        engine_request("a", toy_prompt(100), 80),
        [engine_request(f"b{i}", toy_prompt(250, i + 2), 4) for i in range(4)],
    )
    records = begin(engine, request, 20)
    engine.admission.park(request.key)
    records.take(engine.step())
    for other in others:
        check_answers(run_to_end(engine, [other]), [other])
    engine.admission.resume(request.key)
    finish(engine, records, request)
    check_answers(records, [request])


def test_a_request_may_be_ended_while_it_is_parked():
    engine = toy_engine()
    request = engine_request("a", toy_prompt(70), 100)
    records = begin(engine, request, 10)
    engine.admission.park(request.key)
    records.take(engine.step())
    engine.cancel(request.key)
    records.take(engine.step())
    assert records[request.key].ended.error == "cancelled" and not engine.admission.groups
    with pytest.raises(LookupError):
        engine.admission.resume(request.key)
    engine.admission.park(request.key)  # late, and nothing
    engine.step()
    engine.check_integrity()


def test_park_and_resume_before_the_loop_looks():
    engine = toy_engine()
    request = engine_request("a", toy_prompt(70), 30)
    records = begin(engine, request, 5)
    for _ in range(3):
        engine.admission.park(request.key)
        engine.admission.resume(request.key)
    finish(engine, records, request)
    check_answers(records, [request])


def test_a_prompt_that_is_being_read_is_not_parked():
    engine = toy_engine()
    request = engine_request("a", toy_prompt(300), 10)
    records = begin(engine, request, 1)
    engine.admission.park(request.key)
    finish(engine, records, request)
    check_answers(records, [request])


def test_parked_before_it_starts():
    """A Park that the loop finds in front of the Start: there is nothing yet to go back to."""
    reader, engine = toy_engine(), toy_engine()
    request = engine_request("a", toy_prompt(30), 20)
    engine.admission.admit(request)
    reader.admission.accept(request)
    firsts, records = Collector(), Collector(first_index=1)
    firsts.take(reader.step())
    done = firsts[request.key].first
    refs = engine.admission.set_aside(request.key, 30)
    for ours, theirs in zip(refs, reader.admission.groups[request.key].trunk.blocks.ids, strict=True):
        engine.pool.bytes[ours.block_id] = reader.pool.bytes[theirs]
    engine.admission.verify(request.key, 30)
    engine.admission.fetch_settled(request.key)
    engine.admission.park(request.key)
    engine.admission.start(request.key, done.first_tokens)
    engine.admission.resume(request.key)
    run_to_end(engine, collector=records)
    assert [done.first_tokens[0].token_id, *records[request.key].tokens[0]] == toy_answer(request)[0][0]
    assert engine.ledger.num_available == engine.num_blocks and not engine.admission.groups


def test_the_deadline_of_a_parked_request_is_that_of_who_reads_it(monkeypatch):
    engine, now, jumped_s = toy_engine(), time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now() + jumped_s)
    request = engine_request("a", toy_prompt(70), 40, deadline=now() + 600)
    records = begin(engine, request, 5)
    engine.admission.park(request.key)
    records.take(engine.step())
    jumped_s = 601.0
    records.take(engine.step())
    assert records[request.key].ended is None, "a parked key has no deadline of its own"
    engine.admission.resume(request.key, time.monotonic() + 60)
    finish(engine, records, request)
    check_answers(records, [request])
    late = engine_request("b", toy_prompt(70), 40, deadline=time.monotonic() + 60)
    records = begin(engine, late, 5)
    engine.admission.park(late.key)
    records.take(engine.step())
    engine.admission.resume(late.key, time.monotonic())
    finish(engine, records, late)
    assert records[late.key].ended.error == "deadline"


def test_a_key_that_was_resumed_and_had_not_parked_has_the_deadline_of_who_reads_it():
    engine = toy_engine()
    request = engine_request("a", toy_prompt(300), 40)
    records = begin(engine, request, 1)
    engine.admission.resume(request.key, time.monotonic())
    finish(engine, records, request)
    assert records[request.key].ended.error == "deadline"


def test_deadlines_of_what_is_resumed_again_and_again_take_no_more_and_more():
    engine, request = toy_engine(), engine_request("a", toy_prompt(70), 40)
    engine.submit(request)
    groups, group = engine.lifecycle.groups, engine.lifecycle.groups[request.key]
    for number in range(2000):
        group.deadline = 1000.0 + number // 1000
        groups.add_deadline(group)
        assert len(groups._deadlines) < 200
    assert groups.pop_expired(1000.5) is None and groups.pop_expired(1001.0) is group


def test_a_failed_step_ends_what_is_parked_too():
    engine = toy_engine()
    request = engine_request("a", toy_prompt(70), 40)
    records = begin(engine, request, 5)
    engine.admission.park(request.key)
    records.take(engine.step())
    records.take(engine.fail("broken"))
    assert records[request.key].ended.error == "failed"
    engine.check_integrity()
    check_answers(run_to_end(engine, [again := engine_request("b", toy_prompt(70), 20)]), [again])


@pytest.mark.parametrize("seed", range(6))
def test_at_random_moments_among_others(seed):
    rng, engine = random.Random(seed), toy_engine(num_blocks=96, max_model_len=512, max_num_seqs=8)
    requests = [
        engine_request(f"r{i}", toy_prompt(rng.randrange(20, 90), i), rng.randrange(20, 120), n=rng.choice((1, 1, 2)),
                     temperature=1.0, seed=i)
        for i in range(5)
    ]  # fmt: skip
    records, parked = Collector(), set()
    for request in requests:
        engine.submit(request)
    for _ in range(4000):
        live = [request.key for request in requests if not records[request.key].ended]
        if not live:
            break
        key = rng.choice(live)
        if key in parked and rng.random() < 0.3:
            parked.discard(key)
            engine.admission.resume(key)
        elif rng.random() < 0.05:
            parked.add(key)
            engine.admission.park(key)
        records.take(engine.step())
        engine.check_integrity()
    check_answers(records, requests)
    assert engine.ledger.num_available == 96
