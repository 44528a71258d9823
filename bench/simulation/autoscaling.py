"""The scaler at work on a simulated fleet."""

import math
from collections import Counter
from collections.abc import Sequence

from baton.loadgen.summary import percentile
from baton.planning.scaling.counters import FleetCounters
from baton.planning.scaling.scaler import DECIDE_S, Scaler
from baton.protocol import ROLES
from bench.simulation.live_fleet import LiveFleet
from bench.simulation.simulated_request import Asked


class Autoscaling:
    """Let the scaler decide about the fleet each minute, and carry it out: a worker serves `start_s` after the
    decision."""

    def __init__(self, fleet: LiveFleet, scaler: Scaler, start_s: float):
        self._fleet, self._scaler, self._start_s = fleet, scaler, start_s
        self._starting: Counter[str] = Counter()
        self.sizes: list[tuple[float, int, int]] = []  # time, and the workers of each role
        fleet.at(DECIDE_S, self._scale)

    def _scale(self, now: float) -> None:
        fleet = self._fleet
        seen = self._counters(*fleet.take_recent())
        self.sizes.append((now, *seen.serving.values()))
        decision = self._scaler.decide(seen)
        for change in decision.changes(seen.serving, seen.starting) if decision is not None else ():
            if change.kind != "start":
                fleet.drain(change.role, change.number)
            if change.kind != "drain":
                self._start(change.next_role or change.role, change.number)
        fleet.at(now + DECIDE_S, self._scale)

    def _counters(self, came: Sequence[Asked], ended: Sequence[Asked]) -> FleetCounters:
        fleet, served = self._fleet, [one for one in ended if not one.refused]
        return FleetCounters(
            fleet.now, len(came) / DECIDE_S, _mean([one.entry.num_prompt for one in came]),
            _mean([one.entry.num_output for one in came]),
            sum(len(gateway.queues) for gateway in fleet.gateways),
            percentile([one.first_s - one.entry.at_s for one in served], 95),
            percentile([tpot_s for one in served if (tpot_s := one.tpot_s) is not None], 95),
            serving={"prefill": len(fleet.prefill), "decode": len(fleet.decode)},
            starting={role: self._starting[role] for role in ROLES},
        )  # fmt: skip

    def _start(self, role: str, num: int) -> None:
        self._starting[role] += num
        self._fleet.at(self._fleet.now + self._start_s, lambda now: self._started(role, num))

    def _started(self, role: str, num: int) -> None:
        self._starting[role] -= num
        self._fleet.add(role, num)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else math.nan
