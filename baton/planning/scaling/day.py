"""A dry run: the scaler's decisions over a day of load, generated or from a trace, and the fewest workers that could
have served it."""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from baton.loadgen.trace import TraceEntry
from baton.planning.scaling.counters import FleetCounters
from baton.planning.scaling.load_model import LoadModel
from baton.planning.scaling.scaler import DECIDE_S, MOST_BUSY, Scaler, ScalerBounds, role_work
from baton.protocol import ROLES

MINUTES = 24 * 60
_MOST_MINUTES = 60 * MINUTES


class LoadMinute(NamedTuple):
    """Means of one minute's requests."""

    requests_per_s: float
    prompt_tokens: float
    output_tokens: float


class DayResult(NamedTuple):
    """Worker-hours of the scaler and of an oracle that knows each minute in advance and starts workers in no time; the
    share of requests that found too few workers; and the number of workers by role and minute."""

    hours: float
    oracle_hours: float
    missed: float
    num_changes: int
    num_turns: int  # changes from up to down or back, of one role, within a quarter of an hour
    workers: dict[str, list[int]]
    needed: dict[str, list[int]]


def generated_day(seed: int, busiest_rate: float, prompt_tokens: float, output_tokens: float) -> list[LoadMinute]:
    """Return a generated day: quiet at night, peaks before noon and in the evening, noise over some minutes, an
    occasional burst, and longer prompts in working hours."""
    rng, noise, burst = random.Random(seed), 0.0, 0.0
    found: list[LoadMinute] = []
    for minute in range(MINUTES):
        hour = minute / 60
        shape = 0.08 + 0.8 * _hump(hour, 11, 2.8) + 0.92 * _hump(hour, 19.5, 2.4)
        noise = 0.9 * noise + rng.gauss(0, 0.012)
        burst = 0.85 * burst + (rng.uniform(0.05, 0.15) if rng.random() < 0.003 else 0.0)
        rate = busiest_rate * max(0.0, shape * (1 + noise + burst))
        working = _hump(hour, 13, 4)
        found.append(LoadMinute(rate, prompt_tokens * (0.85 + 0.3 * working), output_tokens * (1.1 - 0.2 * working)))
    return found


def _hump(hour: float, at: float, width: float) -> float:
    away = min(abs(hour - at), 24 - abs(hour - at))
    return math.exp(-0.5 * (away / width) ** 2)


def minutes_of(entries: Sequence[TraceEntry]) -> list[LoadMinute]:
    """Return a trace by minutes. Raises ValueError if it is too long, as with a stray stamp."""
    last = int(entries[-1].at_s // DECIDE_S)
    if last > _MOST_MINUTES:
        raise ValueError(f"a trace of {last:,} minutes from first to last, {_MOST_MINUTES:,} at most: see its stamps")
    sums = [[0.0, 0.0, 0.0] for _ in range(last + 1)]
    for entry in entries:
        minute = sums[int(entry.at_s // DECIDE_S)]
        for place, value in enumerate((1, entry.num_prompt, entry.num_output)):
            minute[place] += value
    return [
        LoadMinute(num / DECIDE_S, prompt / num, output / num) if num else LoadMinute(0.0, math.nan, math.nan)
        for num, prompt, output in sums
    ]


def run_day(
    day: Sequence[LoadMinute], model: LoadModel, scaler: Scaler, bounds: ScalerBounds, start_s: float
) -> DayResult:
    """Let the scaler decide each minute by the counters of the previous one. Workers serve `start_s` after the
    decision; drained ones leave immediately. A request is missed if the serving workers are busier than MOST_BUSY."""
    serving = needed_workers(day[0], model, bounds)
    starting: list[tuple[float, str]] = []
    workers: dict[str, list[int]] = {role: [] for role in ROLES}
    needed: dict[str, list[int]] = {role: [] for role in ROLES}
    missed = asked = 0.0
    changes: dict[str, list[tuple[int, int]]] = {role: [] for role in ROLES}
    for number, minute in enumerate(day):
        at_s = number * DECIDE_S
        for role in [role for when, role in starting if when <= at_s]:
            serving[role] += 1
        starting = [(when, role) for when, role in starting if when > at_s]
        least = needed_workers(minute, model, bounds)
        asked += minute.requests_per_s
        missed += minute.requests_per_s * (1 - _served_part(role_work(model, bounds, *minute), serving))
        coming = {role: sum(each == role for _, each in starting) for role in ROLES}
        for role in ROLES:
            workers[role].append(serving[role] + coming[role])
            needed[role].append(least[role])
        seen = FleetCounters(
            at_s + DECIDE_S,
            minute.requests_per_s,
            minute.prompt_tokens,
            minute.output_tokens,
            serving=dict(serving),
            starting=coming,
        )
        decision = scaler.decide(seen)
        if decision is None:
            continue
        for role in ROLES:
            more = decision.wanted[role] - serving[role] - coming[role]
            if more:
                changes[role].append((number, more))
            if more > 0:
                starting += [(at_s + DECIDE_S + start_s, role)] * more
            elif more < 0:
                serving[role] = max(bounds.least[role], serving[role] + more)
    return DayResult(
        sum(map(sum, workers.values())) * DECIDE_S / 3600,
        sum(map(sum, needed.values())) * DECIDE_S / 3600,
        missed / asked if asked else 0.0,
        sum(map(len, changes.values())),
        sum(_num_turns(each) for each in changes.values()),
        workers,
        needed,
    )


def needed_workers(minute: LoadMinute, model: LoadModel, bounds: ScalerBounds) -> dict[str, int]:
    """Return the fewest workers that hold a minute's load."""
    return {
        role: min(max(math.ceil(work / MOST_BUSY - 1e-9), bounds.least[role]), bounds.most[role])
        for role, work in role_work(model, bounds, *minute).items()
    }


def _served_part(work: dict[str, float], serving: dict[str, int]) -> float:
    """Return the share of a minute's requests that the workers hold."""
    return min([1.0, *(serving[role] * MOST_BUSY / each for role, each in work.items() if each)])


def _num_turns(changes: Sequence[tuple[int, int]]) -> int:
    return sum(
        (before > 0) != (more > 0) and number - earlier <= 15
        for (earlier, before), (number, more) in zip(changes, changes[1:], strict=False)
    )
