"""The outcome of one request, as its client saw it."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Latencies(NamedTuple):
    """The latencies of a request that has ended, for the progress line; `tpot_s` is None after a single token, both are
    None after a failure."""

    ttft_s: float | None
    tpot_s: float | None


@dataclass(slots=True)
class Outcome:
    """Times are seconds after the run's start. Latencies count from the intended arrival, so that a late sender does
    not make the server look fast."""

    index: int
    intended_s: float
    num_prompt: int
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    num_output: int = 0
    num_cached: int = 0
    num_messages: int = 0
    longest_gap_s: float = 0.0  # between two messages
    status: str = "OK"  # a gRPC status code
    reason: str = ""
    token_ids: list[int] = field(default_factory=list)  # if the plan keeps them
    phases_s: dict[str, float] = field(default_factory=dict)  # from the reply's timing: PHASES and transfer
    bound_s: dict[str, float] = field(default_factory=dict)  # from the reply's timing: seconds by what was waited for

    @property
    def ok(self) -> bool:
        return self.status == "OK"

    @property
    def latencies(self) -> Latencies:
        return Latencies(self.ttft_s, self.tpot_s) if self.ok else Latencies(None, None)

    @property
    def lag_s(self) -> float:
        """Seconds from the intended to the actual sending."""
        return self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.intended_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.intended_s

    @property
    def decode_s(self) -> float:
        """Seconds after the second message, when only decode steps are left. The transfer overlaps the phases and is
        not one."""
        return max(0.0, self.e2e_s - sum(value for phase, value in self.phases_s.items() if phase != "transfer"))

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        return (self.last_s - self.first_s) / (self.num_output - 1) if self.num_output > 1 else None
