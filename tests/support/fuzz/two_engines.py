"""Two engines that hand requests to each other, by a plan: everything in one thread, so that a seed is all it takes.

What other threads do while an engine steps is done where they could do it: in front of each time that its loop takes
the ledger's lock, and in the forward pass. Time is a number that the plan moves on. After every step blocks, names,
keys and events of the engine agree; every answer is the pure one, and at the end nothing is left.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Protocol
from unittest import mock

from baton.engine import engine
from baton.engine.core.request import Key, Output, Request, RequestEnded
from baton.engine.engine import Engine
from baton.engine.execute import output_processor
from baton.engine.schedule import group_actions, scheduler, sequence, tenant_shares
from tests.support.engine.toy_engine import WholeChoice
from tests.support.fuzz.journey import Journey
from tests.support.fuzz.shrink import Plan
from tests.support.fuzz.wires import Wires

CLOCKED = (engine, group_actions, output_processor, scheduler, sequence, tenant_shares)  # modules that read the time
MAX_ROUNDS = 2000  # of both engines, until everything has ended
BEGAN_S, AGES_S = 1000.0, 1e6
ROUND_S = 0.002


Answers = dict[str, dict[int, WholeChoice]]  # by request id and choice


class Kind(Protocol):
    """Parts that a world is made of."""

    def requests(self, plan: Plan) -> list[Request]: ...

    def answers(self, plan: Plan, requests: Sequence[Request]) -> Answers: ...

    def engines(self, plan: Plan, answers: Answers) -> list[Engine]: ...

    def wires(self, plan: Plan, engines: Sequence[Engine]) -> Wires | None: ...


class Turnstile:
    """The ledger's lock, and what others do in front of it while the loop is at work."""

    def __init__(self, lock: threading.RLock):
        self._lock, self._depth = lock, 0
        self.between: Callable[[], None] | None = None

    def __enter__(self) -> None:
        if not self._depth and self.between is not None:
            self.between()
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exc) -> None:
        self._depth -= 1
        self._lock.release()


class TwoEngines:
    """Obeys one plan; raises AssertionError, or whatever a fault raises."""

    def __init__(self, plan: Plan, kind: Kind):
        self.plan = plan
        requests = kind.requests(plan)
        self.requests = {request.key.request_id: request for request in requests}
        self.answers = kind.answers(plan, requests)
        self.engines = kind.engines(plan, self.answers)
        self.wires = kind.wires(plan, self.engines)
        self.journeys: dict[str, Journey] = {}
        self.counts: Counter[str] = Counter()
        self.now = BEGAN_S
        self._open: set[tuple[int, Key]] = set()
        self._spans: list[set[bytes]] = [set(), set()]  # as the events tell
        self._courses = {wish["id"]: (wish["course"], wish["at"]) for wish in plan["requests"]}
        self._deadlines = {wish["id"]: wish.get("deadline_ms") for wish in plan["requests"]}
        self._stepping: list[Turnstile] = []
        self._broken = [False, False]
        self._turnstiles = [Turnstile(each.ledger.lock) for each in self.engines]
        for number, each in enumerate(self.engines):
            each.ledger.lock = self._turnstiles[number]
            each.on_progress = lambda outputs, number=number: self._take(number, outputs)
            self._watch_forward(number, each)

    def run(self) -> Counter[str]:
        """Obey the plan; returns what there was to count."""
        try:
            with self._clocked():
                for op in self.plan["ops"]:
                    self._do(op)
                self._settle()
        finally:
            if self.wires:
                self.wires.close()
        return self.counts

    # ---- for journeys ----

    def opened(self, engine: Engine, key: Key) -> None:
        self._open.add((self.engines.index(engine), key))

    # ---- operations ----

    def _do(self, op: list) -> None:
        match op:
            case ["step", number, between]:
                self._step(number, between)
            case ["tick", ms]:
                self.now += ms / 1e3
            case ["break", number]:
                self._broken[number] = True
            case ["move", name, course, at]:
                if name in self.journeys:
                    self.journeys[name].move(course, at)
            case ["go", name]:
                if name in self.requests:
                    self._journey(name).go()
            case [verb, name]:
                if name in self.journeys:
                    getattr(self.journeys[name], verb)()
            case _:
                raise ValueError(f"no operation: {op}")
        self.counts[op[0]] += 1

    def _journey(self, name: str) -> Journey:
        if name not in self.journeys:
            request, ms = self.requests[name], self._deadlines[name]
            if ms is not None:
                request = replace(request, deadline=self.now + ms / 1e3)
            self.journeys[name] = Journey(self, request, *self._courses[name])
        return self.journeys[name]

    def _step(self, number: int, between: Sequence = ()) -> None:
        turnstile, engine = self._turnstiles[number], self.engines[number]
        if turnstile.between is not None:  # inside a step of its own
            return
        left = sorted(between, key=lambda item: item[0])
        count = 0

        def others() -> None:
            nonlocal count
            turnstile.between = _nothing
            while left and left[0][0] <= count:
                self._do(left.pop(0)[1])
            turnstile.between = others
            count += 1

        turnstile.between = others
        try:
            outputs = engine.step()
        except Broken as error:
            outputs = engine.fail(str(error))
        finally:
            turnstile.between = None
        self._take(number, outputs)
        self._check(number)

    def _take(self, number: int, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output, RequestEnded):
                assert not output.error.startswith("failed") or output.message == "broken", output.message
                assert (number, output.key) in self._open, f"{output} of a key that is not open"
                self._open.remove((number, output.key))
            else:
                assert (number, output.key) in self._open, f"{output} after the end"
            journey = self.journeys.get(output.key.request_id)
            if journey is not None and output.key == journey.attempt.key:
                journey.attempt.take(self.engines[number], output)

    def _watch_forward(self, number: int, each: Engine) -> None:
        model, forward = each.runner.model, each.runner.model.hidden

        def hidden(*args, **options):
            turnstile = self._turnstiles[number]
            if turnstile.between is not None:
                turnstile.between()
            if self._broken[number]:
                self._broken[number] = False
                raise Broken("broken")
            return forward(*args, **options)

        model.hidden = hidden

    # ---- what must hold ----

    def _check(self, number: int) -> None:
        each, spans = self.engines[number], self._spans[number]
        each.check_integrity()
        sealed, evicted = each.ledger.block_events()
        assert not spans & set(sealed) and spans >= set(evicted), "events that cannot follow each other"
        spans |= set(sealed)
        spans -= set(evicted)
        assert spans == set(each.ledger.snapshot()), "events do not add up to what is cached"

    def _settle(self) -> None:
        """Wait until all requests have ended, and judge their ends."""
        self._broken = [False, False]
        for name in self.requests:
            self._journey(name)
        for _ in range(MAX_ROUNDS):
            waiting = [journey for journey in self.journeys.values() if not journey.ended or journey.is_under_way]
            if not waiting and not any(each.has_work() for each in self.engines):
                break
            for journey in waiting:
                journey.go()
                journey.resume()
            for number in range(2):
                self._step(number)
            self.now += ROUND_S
        else:
            raise AssertionError(f"a hang: {[(j.asked.key.request_id, j.ended) for j in waiting]}")
        for name, journey in self.journeys.items():
            self._judge(name, journey)
        self._check_empty()

    def _judge(self, name: str, journey: Journey) -> None:
        self.counts["requests"] += 1
        self.counts[journey.ended] += 1
        self.counts["tokens"] += sum(map(len, journey.tokens.values()))
        self.counts["attempts"] += journey.attempt.key.attempt + 1
        for choice, whole in self.answers[name].items():
            made, count = journey.tokens.get(choice, []), len(journey.tokens.get(choice, ()))
            assert made == whole.token_ids[:count], f"wrong tokens: {made}, undisturbed {whole.token_ids}"
            told = journey.logprobs.get(choice, [])
            assert told == whole.logprobs[: len(told)], "wrong logprobs"
            if journey.ended == "done":
                assert count == len(whole.token_ids), f"cut short: {count} tokens of {len(whole.token_ids)}"
                assert journey.reasons[choice] == whole.reason, "another reason to finish"
                assert len(told) == len(whole.logprobs), "logprobs are missing"

    def _check_empty(self) -> None:
        assert not self._open, f"keys that never ended: {self._open}"
        self.now += AGES_S
        for number, each in enumerate(self.engines):
            self._step(number)
            assert each.ledger.num_available == each.num_blocks and not each.ledger.num_reserved, "blocks are missing"
            tables = {
                "groups": each.lifecycle.groups, "quarantined": each.lifecycle.quarantined,
                "deadlines": each.lifecycle.groups._deadlines, "running": each.scheduler.running,
                "waiting": each.scheduler.waiting, "inbox": list(each.inbox._commands),
                "waiting tokens": each.lifecycle.num_waiting_tokens, "choices": each.lifecycle.num_choices,
                "drafts": [tracks for tracks in each.speculator._tracks.values() if tracks],
            }  # fmt: skip
            left = {name: table for name, table in tables.items() if table}
            assert not left, f"tables that are not empty: {left}"

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        clock = SimpleNamespace(monotonic=lambda: self.now)
        with ExitStack() as exits:
            for module in CLOCKED:
                exits.enter_context(mock.patch.object(module, "time", clock))
            yield


class Broken(Exception):
    """The plan made a forward pass raise this."""


def _nothing() -> None:
    pass
