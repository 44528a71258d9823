"""Threads that call the ledger beside the loop, switched every ten microseconds, over keys whose time runs out."""

import random
import threading
import time

import pytest

from baton.engine.core.request import Refusal, RequestEnded
from baton.engine.loop import EngineLoop
from tests.support.engine.collector import Collector
from tests.support.engine.toy_engine import engine_request, toy_answer, toy_engine, toy_prompt

NUM_THREADS = 3


@pytest.mark.parametrize("num_requests", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_deadlines_run_out_while_threads_call(fast_switches, num_requests):
    engine, records, gone = toy_engine(block_size=32, num_blocks=24, max_num_seqs=4), Collector(), threading.Event()
    requests, lock, errors = [], threading.Lock(), []

    def take(outputs) -> None:
        records.take(outputs)
        if any(isinstance(output, RequestEnded) for output in outputs):
            gone.set()

    def call(number: int) -> None:
        draw = random.Random(number)
        try:
            for index in range(num_requests // NUM_THREADS):
                request = _request(draw, f"{number}-{index}")
                if _ask(engine, request, draw):
                    with lock:
                        requests.append(request)
        except Exception as error:  # to the thread that asserts
            errors.append(error)

    loop = EngineLoop(engine, take)
    loop.start()
    callers = [threading.Thread(target=call, args=(number,)) for number in range(NUM_THREADS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    while engine.admission.groups:
        gone.clear()
        engine.inbox.ring()
        gone.wait(0.1)
    loop.stop()
    records.take(engine.step())
    assert not errors, errors[0]
    _judge(engine, records, requests)


def _request(draw: random.Random, name: str):
    deadline = time.monotonic() + draw.choice((0.0, 0.002, 0.02, 60.0, 60.0))
    return engine_request(
        name, toy_prompt(draw.randint(1, 150), draw.randrange(5)), draw.randint(1, 6), deadline=deadline
    )


def _ask(engine, request, draw: random.Random) -> bool:
    """Admit a request, as a whole or as one whose KV is fetched and never arrives. Return whether it was admitted."""
    fetches = draw.random() < 0.5
    while True:
        try:
            engine.admission.admit(request) if fetches else engine.submit(request)
            break
        except Refusal:
            if time.monotonic() > request.deadline:
                return False
            time.sleep(0.0005)
    try:
        if fetches:
            engine.admission.set_aside(request.key, draw.randint(1, len(request.token_ids)))
            time.sleep(draw.choice((0, 0.001, 0.004)))
            engine.admission.compute_rest(request.key)
    except (LookupError, Refusal):  # its time is over, or it is about to be
        engine.cancel(request.key)
    finally:
        engine.admission.fetch_settled(request.key)
    if draw.random() < 0.2:
        draw.choice((engine.cancel, engine.admission.park))(request.key)
        try:
            engine.admission.resume(request.key, request.deadline)
        except LookupError:
            pass
    return True


def _judge(engine, records: Collector, requests) -> None:
    endings = [records[request.key].ended for request in requests]
    assert all(ended is not None and ended.error in ("", "deadline", "cancelled") for ended in endings)
    assert {ended.error for ended in endings} == {"", "deadline", "cancelled"}
    for request in requests:
        whole = toy_answer(request)[0][0]
        made = records[request.key].tokens.get(0, [])
        assert made == (whole if not records[request.key].ended.error else whole[: len(made)])
    assert engine.ledger.num_available == engine.num_blocks and not engine.ledger.num_reserved
    engine.check_integrity()
