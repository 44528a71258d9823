"""Say how jobs are sent: to which gateway, how many at once, and as whom."""

from dataclasses import dataclass

from baton.service.security.access import Access


@dataclass(frozen=True)
class RunPlan:
    """`concurrency` None: an open loop, each job at its time."""

    target: str
    vocab_size: int
    concurrency: int | None = None
    num_processes: int = 1
    timeout_s: float = 120.0
    seed: int = 0
    access: Access = Access()
    slo_class: str = ""  # that requests name; empty: none
    retries: bool = False  # sends a refused request again after the pause that the refusal asks for
    keeps_tokens: bool = False  # outcomes have the token ids that came
