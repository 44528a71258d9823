"""Proposals on the toy model, whose answer shows any KV out of place: right, wrong, at the end, on a full pool."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton.engine.core.request import FinishReason, Refusal, Speculation
from baton.engine.speculation.control.controller import NUM_COLD_STEPS, PLAIN_RUN
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.forced import ForcedProposer
from tests.support.engine.serving import check_answers, random_requests
from tests.support.engine.toy_engine import TOY_VOCAB, engine_request, toy_answer, toy_engine, toy_prompt


def forced(requests, probability: float) -> ForcedProposer:
    answers = {
        (request.key.request_id, choice): tokens
        for request in requests
        for choice, (tokens, _) in toy_answer(request).items()
    }
    return ForcedProposer(answers, probability, TOY_VOCAB)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("probability", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("width", [1, 3, 16])
def test_tokens_are_those_of_plain_decoding(block_size, probability, width):
    requests = [
        engine_request("greedy", toy_prompt(63), 70),
        engine_request("sampled", toy_prompt(30, 2), 70, temperature=1.0, seed=5),
        engine_request("filtered", toy_prompt(64, 3), 70, temperature=0.8, top_k=20, top_p=0.9, seed=6),
        engine_request("choices", toy_prompt(100, 4), 50, n=3, temperature=1.2, seed=7),
        engine_request("plain", toy_prompt(40, 5), 50, speculation=Speculation("off")),
        engine_request("narrow", toy_prompt(20, 6), 50, speculation=Speculation(num_tokens=2)),
    ]
    proposer = forced(requests, probability)
    options = dict(block_size=block_size, num_blocks=4096 // block_size, max_num_seqs=8, num_draft_tokens=width)
    engine = toy_engine(proposer, speculator="auto", max_num_batched_tokens=256, **options)
    records = run_to_end(engine, requests)
    check_answers(records, requests)
    report = records[requests[0].key].ended.report
    assert report.num_draft_tokens >= report.num_accepted_tokens
    assert len(report.proposed_by_position) == len(report.accepted_by_position) <= width
    if probability == 1.0:
        assert report.num_accepted_tokens + report.num_steps == 69
        # One beside the prompts, whose chunks left no budget, and a run of plain ones that is measured.
        assert report.num_steps <= -(-69 // (width + 1)) + 1 + PLAIN_RUN
    if probability == 0.0:
        assert report.num_accepted_tokens == 0 and report.num_steps == 69
    assert records[requests[4].key].ended.report.num_draft_tokens == 0
    assert len(records[requests[5].key].ended.report.proposed_by_position) == 2
    load = engine.load_report()
    assert load.num_draft_tokens == sum(r.ended.report.num_draft_tokens for r in records.values())
    assert load.num_accepted_tokens == sum(r.ended.report.num_accepted_tokens for r in records.values())
    engine.step()
    assert not proposer.live
    assert engine.ledger.num_available == engine.num_blocks and engine.ledger.num_reserved == 0


@pytest.mark.parametrize("position", [1, 4, 5, 8, 9])
def test_a_stop_inside_an_accepted_run_cuts_it(position):
    plain = engine_request("a", toy_prompt(40), 30)
    tokens = toy_answer(plain)[0][0]
    stopped = engine_request("a", toy_prompt(40), 30, stop_token_ids=frozenset([tokens[position]]))
    engine = toy_engine(forced([plain], 1.0), speculator="auto", num_draft_tokens=4)
    records = run_to_end(engine, [stopped])
    check_answers(records, [stopped])
    first = tokens.index(tokens[position])
    assert records[stopped.key].answer()[0] == (tokens[: first + 1], FinishReason.STOP)
    report = records[stopped.key].ended.report
    assert report.num_accepted_tokens + report.num_steps in (first, first + 1)


def test_min_tokens_and_max_tokens_inside_a_run():
    plain = engine_request("a", toy_prompt(40), 40)
    tokens = toy_answer(plain)[0][0]
    stop = frozenset(tokens[2:4])
    for min_tokens in (0, 3, 6, 17):
        request = engine_request("a", toy_prompt(40), 20, stop_token_ids=stop, min_tokens=min_tokens)
        engine = toy_engine(forced([request], 1.0), speculator="auto", num_draft_tokens=7)
        check_answers(run_to_end(engine, [request]), [request])
    for max_tokens in range(1, 12):
        request = engine_request("a", toy_prompt(40), max_tokens)
        engine = toy_engine(forced([plain], 1.0), speculator="auto", num_draft_tokens=4)
        records = run_to_end(engine, [request])
        check_answers(records, [request])
        assert len(records[request.key].tokens[0]) == max_tokens


def test_a_run_goes_to_the_last_position():
    request = engine_request("a", toy_prompt(75), max_tokens=5)
    engine = toy_engine(forced([request], 1.0), speculator="auto", num_draft_tokens=16, num_blocks=5, max_model_len=80)
    records = run_to_end(engine, [request])
    assert records[request.key].answer() == toy_answer(request)


@pytest.mark.parametrize("probability", [0.7, 1.0])
@pytest.mark.parametrize("states", [{}, dict(num_states=8, checkpoint_tokens=64)])
def test_what_was_accepted_is_sealed_and_what_was_not_is_not(probability, states):
    """Where a state is kept no step goes past its place: it would stand elsewhere."""
    request = engine_request("a", toy_prompt(100), 60)
    engine = toy_engine(forced([request], probability), speculator="auto", num_draft_tokens=5, **states)
    answer = run_to_end(engine, [request])[request.key].answer()[0][0]
    engine.speculator.proposers.clear()
    following = engine_request("b", [*request.token_ids, *answer, 5, 6, 7])
    records = run_to_end(engine, [following])
    assert records[following.key].first.num_cached_tokens == 128
    check_answers(records, [following])


def watch_room(engine) -> None:
    """See that a guess takes blocks that nobody is promised only where all that run could still grow."""
    scheduler, ledger = engine.scheduler, engine.ledger
    room_for_draft = scheduler.room_for_draft

    def watched(seq, num_tokens):
        before = ledger.num_available
        room = room_for_draft(seq, num_tokens)
        assert ledger.num_available == before or ledger.num_available >= len(scheduler.running)
        return room

    scheduler.room_for_draft = watched


@pytest.mark.parametrize("seed", range(8))
def test_random_load_on_a_small_pool_with_cancels(seed):
    """Everything at once; integrity after every step, no sequence is preempted for a guess of another."""
    chance = random.Random(seed)
    block_size = chance.choice([16, 32, 64])
    requests = [
        replace(request, speculation=Speculation(num_tokens=chance.choice([None, None, 0, 2, 16])))
        for request in random_requests(chance, seed, 12)
    ]
    proposer = forced(requests, 0.8)
    engine = toy_engine(
        proposer,
        block_size=block_size,
        num_blocks=512 // block_size,
        max_num_seqs=chance.choice([2, 4, 6]),
        max_num_batched_tokens=chance.choice([70, 100, 200]),
        speculator="auto",
        num_draft_tokens=6,
    )
    watch_room(engine)
    records, cancelled = Collector(), set()
    for request in requests:
        while True:
            try:
                engine.submit(request)
                break
            except Refusal:
                records.take(engine.step())
                engine.check_integrity()
        for _ in range(chance.randint(0, 12)):
            records.take(engine.step())
            engine.check_integrity()
        if chance.random() < 0.2:
            engine.cancel(request.key)
            cancelled.add(request.key)
    run_to_end(engine, collector=records)
    check_answers(records, [request for request in requests if request.key not in cancelled])
    assert engine.load_report().num_accepted_tokens > 0
    engine.step()
    assert not proposer.live
    assert engine.ledger.num_available == engine.num_blocks and engine.ledger.num_reserved == 0


def test_the_speedup_is_that_of_the_clock(monkeypatch):
    """At a width of its own a request's gain is reported: a plain step takes 1 s, five tokens a draft and a step
    of 1.75 s. From the first step on, also of those before a plain step was measured."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    for module in ("engine", "execute.output_processor", "schedule.sequence"):
        monkeypatch.setattr(f"baton.engine.{module}.time", clock)
    request = engine_request("a", toy_prompt(40), 400)
    proposer = forced([request], 1.0)
    engine = toy_engine(proposer, speculator="auto", num_draft_tokens=4)
    engine.speculator._clock = clock.monotonic
    run_step, propose = engine.runner.run, proposer.propose

    def stepping(slices, on_layer=None):
        clock.now += 1.5 if slices[0].seq.draft_ids else 1.0
        return run_step(slices, on_layer)

    def proposing(asks):
        clock.now += 0.25
        return propose(asks)

    engine.runner.run, proposer.propose = stepping, proposing
    report = run_to_end(engine, [request])[request.key].ended.report
    num_plain = report.num_steps - report.num_drafts
    assert 1 <= num_plain <= 2 * (NUM_COLD_STEPS + PLAIN_RUN) and report.num_accepted_tokens > 300
    num_tokens = report.num_steps + report.num_accepted_tokens
    assert report.decode_s == pytest.approx(num_plain + 1.75 * report.num_drafts)
    assert report.speedup == pytest.approx(num_tokens / report.decode_s, rel=1e-6) and report.speedup > 2


@pytest.mark.parametrize("wish", [Speculation(num_tokens=0), Speculation("off", 4)])
def test_a_request_that_wants_no_proposals_makes_those_of_others_no_dearer(wish):
    """What brings nothing is tried out of the allowance beside it too: a plain step takes 1 s, a draft 0.25 s."""
    clock = SimpleNamespace(now=0.0)
    requests = [
        engine_request("plain", toy_prompt(40), 400, speculation=wish),
        engine_request("free", toy_prompt(40, 2), 400),
    ]
    proposer = forced(requests, 0.0)
    engine = toy_engine(proposer, speculator="auto")
    engine.speculator._clock = lambda: clock.now
    run_step, propose = engine.runner.run, proposer.propose

    def stepping(slices, on_layer=None):
        clock.now += 1.0 + 0.1 * sum(len(piece.seq.draft_ids) for piece in slices)
        return run_step(slices, on_layer)

    def proposing(asks):
        clock.now += 0.25
        return propose(asks)

    engine.runner.run, proposer.propose = stepping, proposing
    check_answers(run_to_end(engine, requests), requests)
    assert 0 < engine.speculator.counts["forced"].num_drafts < 50


def test_a_step_that_fails_leaves_nothing_open():
    request = engine_request("a", toy_prompt(40), 30)
    proposer = forced([request], 1.0)
    engine = toy_engine(proposer, speculator="auto", num_draft_tokens=4)
    engine.submit(request)
    for _ in range(3):
        engine.step()
    assert proposer.live
    engine.runner.model.before_forward = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.fail("test")
    engine.step()
    assert not proposer.live and engine.ledger.num_available == engine.num_blocks
    engine.check_integrity()
