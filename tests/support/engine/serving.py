"""Requests served by one engine in any order, and what must hold of it afterwards."""

import random
from collections.abc import Callable
from contextlib import suppress

from baton.engine.core.request import Refusal, Request
from baton.engine.engine import Engine
from tests.support.engine.collector import Collector, Record, run_to_end


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
