"""Say how jobs are sent, to which server, how many at once and as whom; and what is asked of the API that they go
to."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from baton.loadgen.outcome import Outcome
from baton.loadgen.workload import Job
from baton.service.security.access import Access


@dataclass(frozen=True)
class OpenAIServer:
    """A server of OpenAI's API below `url`, and the model that is asked. `ignores_eos`: it takes `ignore_eos`, vLLM's
    word for answers that are as long as they are asked to be."""

    url: str
    model: str
    ignores_eos: bool


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
    model: str = ""  # of the gateway's; empty: the only one
    slo_class: str = ""  # that requests name; empty: none
    retries: bool = False  # sends again what is refused for now, after the pause that the refusal asks for
    openai: OpenAIServer | None = None  # instead of the gateway at `target`
    keeps_tokens: bool = False  # outcomes have the token ids that came


class Unreachable(Exception):
    """One line: nothing answers, or not as it should."""


class CallFailed(Exception):
    """A call ended badly: its status, a gRPC code or HTTP and a number, and the reason."""

    def __init__(self, status: str, reason: str):
        super().__init__(f"{status}: {reason}")
        self.status, self.reason = status, reason


class Backend(Protocol):
    """Calls of one API. `make` before a request's time, `stream` at it."""

    def make(self, job: Job) -> Any: ...

    def stream(self, request: Any, outcome: Outcome) -> AsyncIterator[int]:
        """Send the request and yield how many tokens each message has; usage and phases go into `outcome`. Raises
        CallFailed."""
        ...

    async def close(self) -> None: ...
