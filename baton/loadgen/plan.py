"""How jobs are sent: to which server, how many concurrently and with which credentials; and the interface of the
APIs."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from baton.loadgen.outcome import Outcome
from baton.loadgen.workload import Job
from baton.service.security.access import Access


@dataclass(frozen=True)
class OpenAIServer:
    """A server of OpenAI's API at `url`, and the model to ask. `ignores_eos`: it accepts `ignore_eos`, vLLM's field for
    answers of exactly the requested length."""

    url: str
    model: str
    ignores_eos: bool


@dataclass(frozen=True)
class RunPlan:
    """How to send jobs. `concurrency` None means an open loop, with each job at its time."""

    target: str
    vocab_size: int
    concurrency: int | None = None
    num_processes: int = 1
    timeout_s: float = 120.0
    seed: int = 0
    access: Access = Access()
    model: str = ""  # of the gateway; empty: its only one
    slo_class: str = ""  # of all requests; empty: none
    retries: bool = False  # sends a refused request again after the pause that the refusal asks for
    openai: OpenAIServer | None = None  # replaces the gateway at `target`
    keeps_tokens: bool = False  # outcomes keep the token ids of the answer


class Unreachable(Exception):
    """The server does not answer, or not as expected; one line."""


class CallFailed(Exception):
    """A call failed: its status (a gRPC code, or HTTP and a number) and the reason."""

    def __init__(self, status: str, reason: str):
        super().__init__(f"{status}: {reason}")
        self.status, self.reason = status, reason


class Backend(Protocol):
    """Calls of one API. `make` is called before a request's time, `stream` at it."""

    def make(self, job: Job) -> Any: ...

    def stream(self, request: Any, outcome: Outcome) -> AsyncIterator[int]:
        """Send the request and yield the number of tokens of each message; record usage and phases in `outcome`. Raises
        CallFailed."""
        ...

    async def close(self) -> None: ...
