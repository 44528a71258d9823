"""Other threads beside the loop: whatever they do between two of its locked sections, each key ends once and all
blocks come back."""

import ctypes
import itertools
import random
import threading
import time
from collections import deque
from contextlib import suppress

import pytest

from baton.engine.core.request import Key, PrefillDone, Refusal, RequestEnded
from baton.engine.loop import EngineLoop
from baton.engine.schedule.inbox import Enter, Inbox
from tests.support.engine.collector import Collector
from tests.support.engine.handover import copy_kv
from tests.support.engine.toy_engine import engine_request, toy_engine, toy_prompt

PATIENCE_S = 60


class InterposedLock:
    """The ledger's lock. Before the loop takes it for the n-th time from outside, the action n of `actions` runs,
    as if another thread had come first: between a look-up without the lock and what follows from it."""

    def __init__(self, actions):
        self._lock = threading.RLock()
        self._actions = dict(actions)
        self._depth = self.num_taken = 0

    def __enter__(self):
        if self._depth == 0:
            self.num_taken += 1
            if (action := self._actions.pop(self.num_taken, None)) is not None:
                action()
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exc):
        self._depth -= 1
        self._lock.release()


def _admitted(engine, deadline):
    engine.admission.admit(request := engine_request("a", toy_prompt(100), 6, deadline=deadline))
    engine.admission.set_aside(request.key, 64)
    return request


def _fetched(engine, deadline):
    source = toy_engine()
    acceptance = source.admission.accept(request := engine_request("a", toy_prompt(100), 6, deadline=deadline))
    source.step()
    engine.admission.admit(request)
    copy_kv(source, acceptance.blocks, engine, engine.admission.set_aside(request.key, 100))
    engine.admission.verify(request.key, 100)
    engine.admission.fetch_settled(request.key)
    return request


def _held(engine, deadline):
    engine.admission.accept(request := engine_request("a", toy_prompt(100), 6, deadline=deadline))
    return request


def _held_and_fetching(engine, deadline):
    engine.admission.accept(request := engine_request("a", toy_prompt(100), 6, deadline=deadline), fetches=True)
    engine.admission.begin_fetch(request.key)
    return request


def _decoding(engine, deadline):
    engine.submit(request := engine_request("a", toy_prompt(20), 6, deadline=deadline))
    return request


ACTIONS = {
    "cancel": lambda engine, request: engine.cancel(request.key),
    "release": lambda engine, request: engine.admission.release_lease(request.key),
    "start": lambda engine, request: engine.admission.start(request.key, ()),
    "compute": lambda engine, request: engine.admission.compute_rest(request.key),
    "settle": lambda engine, request: engine.admission.fetch_settled(request.key),
    "park": lambda engine, request: engine.admission.park(request.key),
    "resume": lambda engine, request: engine.admission.resume(request.key),
}
PLAUSIBLE = {
    _admitted: ("cancel", "compute", "settle"),
    _fetched: ("cancel", "start", "compute", "park"),
    _held: ("cancel", "release"),
    _held_and_fetching: ("cancel", "release", "compute", "settle"),
    _decoding: ("cancel", "park", "resume"),
}


def _play(opening, deadline, actions) -> int:
    """Steps a fresh engine to its end with `actions` (where, name) done from outside; how often the lock was taken."""
    engine, records = toy_engine(), Collector()
    request = opening(engine, deadline)

    def act(name):
        with suppress(LookupError, Refusal):  # what these methods say of a key that has ended
            ACTIONS[name](engine, request)

    lock = InterposedLock({where: lambda name=name: act(name) for where, name in actions})
    engine.ledger.lock = lock
    for _ in range(8):
        records.take(engine.step())
    num_taken = lock.num_taken
    engine.ledger.lock = threading.RLock()
    engine.cancel(request.key)
    engine.admission.fetch_settled(request.key)
    while engine.has_work():
        records.take(engine.step())
    assert records[request.key].ended is not None, "no end"
    engine.check_integrity()
    assert engine.ledger.num_available == engine.num_blocks and not engine.admission.groups
    assert engine.load_report().num_waiting_tokens == 0 and engine.lifecycle.num_choices == 0
    return num_taken


@pytest.mark.parametrize("num_first", (5, pytest.param(8, marks=pytest.mark.long)))
@pytest.mark.parametrize("is_late", (True, False), ids=("late", "in time"))
@pytest.mark.parametrize("opening", PLAUSIBLE, ids=lambda opening: opening.__name__.strip("_"))
def test_every_place_where_another_thread_may_come_between(opening, is_late, num_first):
    """One call from outside at every place, and two at every pair of the first ones."""
    deadline = time.monotonic() - 1 if is_late else float("inf")
    num_places = _play(opening, deadline, ()) + 2
    assert num_places > 6
    for name in PLAUSIBLE[opening]:
        for where in range(1, num_places):
            _play(opening, deadline, ((where, name),))
    for first, second in itertools.product(PLAUSIBLE[opening], repeat=2):
        for where, later in itertools.combinations(range(1, num_first + 1), 2):
            _play(opening, deadline, ((where, first), (later, second)))


def _enter(engine, kind: str, request) -> None:
    """Waits where the engine is full."""
    while True:
        try:
            if kind == "fetch":
                return engine.admission.admit(request)
            if kind == "decode":
                return engine.submit(request)
            return engine.admission.accept(request, fetches=kind == "pull")
        except Refusal:
            time.sleep(0.0005)


def _live_and_die(engine, name: str, draw: random.Random) -> None:
    """One key through one of its lives, given up about when its deadline comes."""
    deadline = time.monotonic() + draw.uniform(0, 0.002)
    request = engine_request(name, toy_prompt(draw.randint(1, 90), draw.randint(0, 5)), 6, deadline=deadline)
    kind = draw.choice(("fetch", "fetch", "hold", "pull", "decode"))
    _enter(engine, kind, request)
    with suppress(LookupError, Refusal):  # its deadline has come already
        if kind == "fetch":
            engine.admission.set_aside(request.key, len(request.token_ids))
        if kind == "decode" and draw.random() < 0.5:
            engine.admission.park(request.key)
            engine.admission.resume(request.key, deadline)
    while time.monotonic() < deadline - draw.uniform(-2e-5, 1e-4):
        pass
    if draw.random() < 0.5:
        engine.admission.release_lease(request.key)
    engine.cancel(request.key)
    engine.admission.fetch_settled(request.key)


def test_threads_end_keys_whose_deadlines_come(fast_switches):
    """Four threads, thousands of keys that are ended from both sides at once."""
    engine, records, errors = toy_engine(num_blocks=256, max_num_seqs=32), Collector(), []
    num_keys, names = 6000, itertools.count()

    def take(outputs):
        try:
            records.take(outputs)
        except AssertionError as error:
            errors.append(error)

    def live(seed: int) -> None:
        draw = random.Random(seed)
        while (index := next(names)) < num_keys:
            _live_and_die(engine, f"{index}", draw)

    loop = EngineLoop(engine, take)
    loop.start()
    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        engine.check_integrity()
        time.sleep(0.01)
    give_up = time.monotonic() + PATIENCE_S
    while engine.has_work() or engine.admission.groups:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    loop.stop()
    take(engine.step())
    assert not errors, errors[:3]
    assert len(records) == num_keys and all(record.ended is not None for record in records.values())
    assert {record.ended.error for record in records.values()} <= {"", "cancelled", "deadline"}
    engine.check_integrity()
    assert engine.ledger.num_available == engine.num_blocks and engine.lifecycle.num_choices == 0


def test_a_command_for_a_key_that_has_ended_is_not_for_the_next_of_that_name():
    """The loop is to end a prefill for a taker; somebody else does, and the key comes again before the loop looks."""
    engine, request = toy_engine(), engine_request("a", toy_prompt(100))
    engine.admission.accept(request, fetches=True)
    engine.admission.release_lease(request.key)
    engine.cancel(request.key)
    engine.admission.accept(request)
    ended, *others = engine.step()
    assert isinstance(ended, RequestEnded) and ended.error == "cancelled"
    assert isinstance(others[-1], PrefillDone) and request.key in engine.admission.groups
    engine.admission.release_lease(request.key)
    (ended,) = engine.step()
    assert isinstance(ended, RequestEnded) and not ended.error
    engine.check_integrity()


def test_a_command_posted_as_the_last_look_finds_none_rings():
    """Or the loop would sleep over it."""

    class Late(deque):
        late = [Enter(Key("late"), 2)]

        def __bool__(self):
            found = len(self) > 0
            if not found and self.late:
                inbox.post(self.late.pop())
            return found

    inbox = Inbox()
    inbox._commands = Late()
    inbox.post(Enter(Key("first"), 1))
    assert [command.key for command in inbox.drain()] == [Key("first")]
    assert len(inbox) == 1 and ctypes.c_int32.from_address(inbox.address).value, "the bell"
    assert [command.key for command in inbox.drain()] == [Key("late")]
