"""Decide once a minute how many workers of each role a fleet should have.

  up      the load now, or by the time a new worker serves, is more than the workers hold
  down    the peak of the last minutes is less than the remaining workers hold, and no worker was added lately
  else    no change: there is a gap between the two bounds, so a load at a boundary moves nothing

Latencies do not steer the number directly. A queue, or a p95 of tokens that is too slow, adds a worker if the model
says that there is room: once per start time of a worker, after the last one came, and only while the role is busy. So a
latency that no number of workers mends does not add them endlessly."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.planning.scaling.counters import FleetCounters, is_number
from baton.planning.scaling.load_model import LoadModel
from baton.protocol import ROLES
from baton.service.slo import Slo

DECIDE_S = 60.0
MOST_BUSY = 0.8  # of a worker's time: above it, requests wait for one another, whatever the single-worker model says
_UP, _DOWN = 0.96, 0.88  # of MOST_BUSY: a load at one boundary is well within the other's
_TREND_SAMPLES = 10  # for the slope
_PEAK_S = 900.0  # over which the remaining workers must hold the peak
_STAY_S = 600.0  # after a worker was added, during which none of its role is removed
_SMOOTHING = 0.3  # weight of a new ratio: one stall is no slow fleet
_RATIOS = (0.5, 3.0)  # bounds of a believable ratio
_BUSY = 0.5  # of what a role holds: below it, another worker mends no queue


@dataclass(frozen=True)
class ScalerBounds:
    """The fewest and most workers by role, and the most of both roles together."""

    least: Mapping[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 1})
    most: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 64))
    most_together: int = 128

    def __post_init__(self) -> None:
        """Check that the bounds do not contradict each other. Raises ValueError."""
        for role in ROLES:
            if not 0 <= self.least[role] <= self.most[role]:
                raise ValueError(f"{role} workers: at least {self.least[role]} and at most {self.most[role]}")
        if self.least["decode"] < 1:
            raise ValueError("decode workers: at least 1, or nobody would answer")
        if sum(self.least.values()) > self.most_together:
            raise ValueError(f"{sum(self.least.values())} workers at least, and {self.most_together} at most together")


def role_work(
    model: LoadModel, bounds: ScalerBounds, requests_per_s: float, prompt_tokens: float, output_tokens: float
) -> dict[str, float]:
    """Return the work of each role, in fully busy workers."""
    if not requests_per_s:
        return dict.fromkeys(ROLES, 0.0)
    read = requests_per_s * model.read_s(prompt_tokens)
    write = requests_per_s * model.write_s(prompt_tokens, output_tokens)
    if not bounds.most["prefill"]:  # then decode workers read prompts too
        return {"prefill": 0.0, "decode": read + write}
    return {"prefill": read, "decode": write}


class ScaleDecision(NamedTuple):
    """How many workers of each role there should be, with a short reason for each role."""

    wanted: dict[str, int]
    reasons: dict[str, str]

    def changes(self, serving: Mapping[str, int], starting: Mapping[str, int]) -> list["ScaleChange"]:
        """Return the changes that lead to this decision. A surplus worker of one role becomes a missing one of the
        other. Workers that are starting do not justify removing others, since they may take long."""
        missing = {role: self.wanted[role] - serving[role] - starting[role] for role in ROLES}
        spare = {role: serving[role] - self.wanted[role] for role in ROLES}
        found: list[ScaleChange] = []
        for role, other in (ROLES, ROLES[::-1]):
            if (moved := min(missing[role], spare[other])) > 0:
                found.append(ScaleChange("change", other, moved, role))
                missing[role] -= moved
                spare[other] -= moved
        for role in ROLES:
            if missing[role] > 0:
                found.append(ScaleChange("start", role, missing[role]))
            elif spare[role] > 0:
                found.append(ScaleChange("drain", role, spare[role]))
        return found


class ScaleChange(NamedTuple):
    """One change. `kind`: start, drain, or change into `next_role`."""

    kind: str
    role: str
    number: int
    next_role: str = ""

    @property
    def words(self) -> str:
        into = f" into {self.next_role}" if self.next_role else ""
        return f"{self.kind} {self.number} {self.role}{into}"


@dataclass
class _RoleHistory:
    """The work of a role minute by minute, in fully busy workers."""

    work: deque[tuple[float, float]] = field(default_factory=deque)
    begun_at: float = math.inf
    ratio: float = 1.0
    added_at: float = -math.inf
    nudged_at: float = -math.inf
    extra: int = 0  # workers added for a queue, on top of the model

    def note(self, at_s: float, work: float) -> None:
        self.begun_at = min(self.begun_at, at_s)
        self.work.append((at_s, work))
        while len(self.work) > _TREND_SAMPLES and self.work[0][0] < at_s - _PEAK_S:
            self.work.popleft()

    def peak(self, at_s: float) -> float:
        return max(work for at, work in self.work if at > at_s - _PEAK_S)

    def expected(self, at_s: float, ahead_s: float) -> float:
        """Return the work at `at_s + ahead_s` if its recent trend continues; never less than the mean of the
        latest and the average work."""
        recent = list(self.work)[-_TREND_SAMPLES:]
        latest = recent[-1][1]
        if len(recent) < 3:
            return latest
        mean_at = sum(at for at, _ in recent) / len(recent)
        mean = sum(work for _, work in recent) / len(recent)
        spread = sum((at - mean_at) ** 2 for at, _ in recent)
        slope = sum((at - mean_at) * (work - mean) for at, work in recent) / spread
        # The line through the mean: one minute's noise moves it by a tenth.
        return max(mean + slope * (at_s + ahead_s - mean_at), (latest + mean) / 2)


class Scaler:
    """The scaler: call `decide` once a minute with the counters since the last call."""

    def __init__(self, model: LoadModel, bounds: ScalerBounds, slo: Slo, start_s: float):
        """Make a scaler. `start_s`: seconds from a decision until the new worker serves."""
        self._model, self._bounds, self._slo, self._start_s = model, bounds, slo, start_s
        self._roles = {role: _RoleHistory() for role in ROLES}
        self._lengths = (math.nan, math.nan)

    def decide(self, seen: FleetCounters) -> ScaleDecision | None:
        """Return how many workers there should be; None if the counters are missing, and nothing should change."""
        if not is_number(seen.requests_per_s):
            return None
        self._note_lengths(seen)
        self._note_ratios(seen)
        if seen.requests_per_s and not all(map(is_number, self._lengths)):
            return self._to_least(seen)  # requests come, but their lengths are unknown until answers end
        work = role_work(self._model, self._bounds, seen.requests_per_s, *self._lengths)
        wanted, reasons = {}, {}
        for role in ROLES:
            self._roles[role].note(seen.at_s, work[role] * self._roles[role].ratio)
            wanted[role], reasons[role] = self._wanted(role, seen)
        return ScaleDecision(self._within(wanted, reasons), reasons)

    def _to_least(self, seen: FleetCounters) -> ScaleDecision | None:
        """Return a decision that raises the fleet to its minimum without removing workers; None if it is there
        already."""
        have = {role: seen.serving[role] + seen.starting[role] for role in ROLES}
        wanted = {role: max(have[role], self._bounds.least[role]) for role in ROLES}
        reasons: dict[str, str] = dict.fromkeys(ROLES, "of the load nothing is known yet, this is the least")
        return None if wanted == have else ScaleDecision(wanted, reasons)

    def _note_lengths(self, seen: FleetCounters) -> None:
        prompt, output = self._lengths
        if is_number(seen.prompt_tokens) and seen.prompt_tokens:
            prompt = seen.prompt_tokens
        if is_number(seen.output_tokens) and seen.output_tokens:
            output = seen.output_tokens
        self._lengths = prompt, output

    def _note_ratios(self, seen: FleetCounters) -> None:
        """Update the ratios, but not while workers start: what they serve first compiles kernels and fills caches."""
        for role, ratio in (("prefill", seen.read_ratio), ("decode", seen.write_ratio)):
            if is_number(ratio) and ratio and not any(seen.starting.values()):
                history, bounded = self._roles[role], min(max(ratio, _RATIOS[0]), _RATIOS[1])
                history.ratio += _SMOOTHING * (bounded - history.ratio)

    def _wanted(self, role: str, seen: FleetCounters) -> tuple[int, str]:
        history, have = self._roles[role], seen.serving[role] + seen.starting[role]
        expected = history.expected(seen.at_s, self._start_s + DECIDE_S)
        peak = max(history.peak(seen.at_s), expected)
        needed = _holding(expected, _UP)
        self._nudge(role, seen, have, needed)
        up = needed + history.extra
        down = max(_holding(peak, _DOWN) + history.extra, self._bounds.least[role])
        if up > have:
            history.added_at = seen.at_s
            return up, f"{expected:.2f} workers' work is coming, {have} hold {have * MOST_BUSY * _UP:.2f}"
        if down < have:
            if seen.at_s - history.added_at < _STAY_S:
                return have, "one was added less than 10 minutes ago"
            if seen.at_s - history.begun_at < _PEAK_S:
                return have, "the load is known for less than 15 minutes"
            if seen.num_silent:
                return have, "a gateway does not answer, and its part of the load is not known"
            those = "1 that stays holds" if down == 1 else f"{down} that stay hold"
            return down, f"{peak:.2f} workers' work at most, the {those} {down * MOST_BUSY * _DOWN:.2f}"
        return have, f"{expected:.2f} workers' work"

    def _nudge(self, role: str, seen: FleetCounters, have: int, needed: int) -> None:
        """Add an extra worker if the role is busy and misses the objective though it has those that the model says are
        `needed`, and the extra ones; remove one once the others would meet the objective too."""
        history = self._roles[role]
        is_busy = history.work[-1][1] > _BUSY * MOST_BUSY * max(1, have)
        waits = is_number(seen.num_waiting) and seen.num_waiting > 0
        late = waits and role == self._busiest(seen) and _misses(self._slo.ttft_s, seen.ttft_p95_s)
        # Tokens come more slowly the more streams share a worker; without one worker, its streams move to the others.
        slow = role == "decode" and _misses(self._slo.tpot_s, seen.tpot_p95_s)
        too_few = role == "decode" and _misses(self._slo.tpot_s, seen.tpot_p95_s * have / max(1, have - 1))
        if (late or slow) and is_busy and not seen.starting[role]:
            if seen.at_s - history.nudged_at >= self._start_s + DECIDE_S and needed + history.extra <= have:
                history.extra += 1
                history.nudged_at = seen.at_s
        elif history.extra and not waits and not too_few and seen.at_s - history.nudged_at > _STAY_S:
            history.extra -= 1
            history.nudged_at = seen.at_s

    def _busiest(self, seen: FleetCounters) -> str:
        """Return the role with the most work per worker."""

        def share(role: str) -> float:
            work = self._roles[role].work
            return work[-1][1] / max(1, seen.serving[role]) if work else 0.0

        return max(ROLES, key=share)

    def _within(self, wanted: dict[str, int], reasons: dict[str, str]) -> dict[str, int]:
        """Return `wanted` within the bounds; at the common bound, the larger role gives way."""
        bounds = self._bounds
        found = {role: min(max(wanted[role], bounds.least[role]), bounds.most[role]) for role in ROLES}
        while sum(found.values()) > bounds.most_together:
            role = max((each for each in ROLES if found[each] > bounds.least[each]), key=lambda each: found[each])
            found[role] -= 1
            reasons[role] = f"at most {bounds.most_together} workers together"
        return found


def _holding(work: float, part: float) -> int:
    """Return how many workers hold this much work, none busier than `part` of MOST_BUSY."""
    return math.ceil(work / (MOST_BUSY * part) - 1e-9)


def _misses(objective_s: float | None, seen_s: float) -> bool:
    return objective_s is not None and is_number(seen_s) and seen_s > objective_s
