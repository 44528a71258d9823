"""Requests served by one engine in any order, and what must hold of it afterwards."""

import random
from collections.abc import Callable
from contextlib import suppress

from baton.engine.core.request import Refusal, Request
from baton.engine.engine import Engine
from tests.support.engine.collector import Collector, Record, run_to_end
from tests.support.engine.toy_engine import engine_request, toy_answer, toy_prompt

# Options of requests whose answers repeat themselves, so that proposals from their own text are accepted.
REPETITIVE = dict(logit_bias=tuple((token_id, 25.0) for token_id in range(3)))


def random_lives(
    engine: Engine, chance: random.Random, num_turns: int, request_of: Callable[[random.Random, int], Request]
) -> list[tuple[Request, Record]]:
    """Submit, cancel, park and resume requests, and step, in any order, checking integrity after each turn; then let
    the rest end. Returns those that nobody cancelled, with what they gave out."""
    records, live, cancelled = Collector(), {}, set()
    for index in range(num_turns):
        match chance.choice(("submit", "submit", "step", "step", "step", "cancel", "park", "resume")):
            case "submit":
                request = request_of(chance, index)
                with suppress(Refusal):
                    engine.submit(request)
                    live[request.key] = request
            case "step":
                records.take(engine.step())
            case "cancel" if live:
                key = chance.choice(list(live))
                engine.cancel(key)
                cancelled.add(key)
            case "park" if live:
                engine.admission.park(chance.choice(list(live)))
            case "resume":
                _resume_all(engine)
        engine.check_integrity()
    _resume_all(engine)
    run_to_end(engine, collector=records)
    return [(request, records[key]) for key, request in live.items() if key not in cancelled]


def _resume_all(engine: Engine) -> None:
    for key in list(engine.admission.groups):
        engine.admission.resume(key)


def random_requests(chance: random.Random, seed: int, count: int) -> list[Request]:
    """Draw requests with prefixes in common, of all lengths, with several choices, stops and priorities."""
    shared = toy_prompt(150, seed)
    return [
        engine_request(
            f"r{index}",
            shared[: chance.choice([0, 64, 100, 140])] + toy_prompt(chance.randint(1, 120), seed + index),
            max_tokens=chance.randint(1, 140),
            n=chance.choice([1, 1, 1, 2, 3]),
            temperature=chance.choice([0.0, 1.0]),
            seed=index,
            priority=chance.choice([0, 0, 1]),
            stop_token_ids=frozenset(chance.sample(range(97), 1)),
            min_tokens=chance.choice([0, 1]),
        )
        for index in range(count)
    ]


def check_answers(records: Collector, requests) -> None:
    """Hold what a toy engine gave out against the answers that are computed without one."""
    for request in requests:
        record = records[request.key]
        assert record.ended is not None and not record.ended.error, record.ended
        assert record.answer() == toy_answer(request), request.key


def submit(engine, request, records: Collector) -> None:
    """Submit a request, after the steps that the engine takes to have room for it."""
    while True:
        try:
            engine.submit(request)
            return
        except Refusal:
            records.take(engine.step())


def serve(engine, requests, chance: random.Random | None = None, cancel: float = 0.0) -> tuple[Collector, set]:
    """Submit as the engine takes them, and look at its integrity now and then. Returns records and what was
    cancelled."""
    records, cancelled = Collector(), set()
    chance = chance or random.Random(0)
    for request in requests:
        submit(engine, request, records)
        if chance.random() < 0.2:
            records.take(engine.step())
            engine.check_integrity()
        if chance.random() < cancel:
            engine.cancel(request.key)
            cancelled.add(request.key)
    while engine.has_work():
        records.take(engine.step())
    engine.step()
    check_empty(engine)
    return records, cancelled


def serve_parking(engine, requests, chance: random.Random) -> Collector:
    """Submit all at once, and park every now and then one that has begun, for a step. Returns records."""
    records, parked = Collector(), set()
    for request in requests:
        engine.submit(request)
    while engine.has_work() or parked:
        records.take(engine.step())
        engine.check_integrity()
        for key in [request.key for request in requests]:
            if key in parked:
                engine.admission.resume(key)
                parked.remove(key)
            elif records[key].first and not records[key].ended and chance.random() < 0.2:
                engine.admission.park(key)
                parked.add(key)
    engine.step()
    check_empty(engine)
    return records


def check_empty(engine) -> None:
    """Check that no block is in use, and that nothing is left at any proposer."""
    engine.check_integrity()
    assert engine.ledger.num_available == engine.num_blocks and engine.ledger.num_reserved == 0
    for proposer in engine.speculator.proposers.values():
        if proposer.name == "draft":
            assert proposer.num_free_blocks == proposer.pool.num_blocks


def check_same(records: Collector, plain: Collector, keys) -> None:
    """Check that two engines gave out the same for these keys, logprobs bit for bit."""
    for key in keys:
        assert records[key].answer() == plain[key].answer(), key
        assert records[key].logprobs == plain[key].logprobs, f"{key}: logprobs differ in their bits"


def num_accepted(engine) -> int:
    return engine.load_report().num_accepted_tokens
