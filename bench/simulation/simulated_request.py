"""A user's request in a simulated fleet, and its attempts."""

from dataclasses import dataclass, field

from baton.loadgen.trace import TraceEntry
from baton.service.slo import Slo
from bench.simulation.fleet import Request
from gateway.queue.waiting_queue import QueueEntry


@dataclass(slots=True, eq=False)
class Asked:
    """A user's request and its outcome."""

    entry: TraceEntry
    number: int
    gateway: int
    first_s: float = 0.0
    last_s: float = 0.0
    num_done: int = 0  # tokens that the user has
    num_attempts: int = 0
    num_cached: int = 0  # of its last attempt
    refused: str = ""
    queue_entry: QueueEntry | None = None

    @property
    def ended(self) -> bool:
        return bool(self.refused or self.last_s)

    @property
    def tpot_s(self) -> float | None:
        num = self.entry.num_output
        return (self.last_s - self.first_s) / (num - 1) if num > 1 else None

    def met(self, slo: Slo) -> bool:
        at_s = self.entry.at_s
        return not self.refused and slo.met(self.first_s - at_s, self.tpot_s, self.last_s - at_s)


@dataclass(slots=True, eq=False)
class Attempt(Request):
    """One attempt, on one or two workers; events of a dead attempt are ignored."""

    asked: Asked = field(kw_only=True)
    names: tuple[str, ...] = ()
    is_dead: bool = False
