"""A gateway of a simulated fleet: its own admission, queues and breakers, and its view of the workers."""

from typing import NamedTuple

from gateway.link.worker_breaker import BreakerState, WorkerBreaker
from gateway.queue.admission import AdmissionControl
from gateway.queue.waiting_queue import WaitingQueues

MAX_REQUESTS = 100_000  # open requests of one gateway


class LoadReport(NamedTuple):
    """The report of a worker to all gateways."""

    at_s: float
    num_sequences: int = 0
    num_waiting_tokens: int = 0


class SentLoad(NamedTuple):
    """What a gateway has sent to a worker since its report of `reported_at_s`."""

    reported_at_s: float
    num_sequences: int = 0
    num_prompt_tokens: int = 0


class SimulatedGateway:
    """The state of one gateway."""

    def __init__(self, number: int, clock):
        self.number = number
        self.admission = AdmissionControl(MAX_REQUESTS)
        self.queues = WaitingQueues(MAX_REQUESTS, clock=clock)
        self.breakers: dict[str, WorkerBreaker] = {}
        self._sent: dict[str, SentLoad] = {}  # to each worker, since its last report
        self.has_timer = False  # it will ask again soon, for waiting requests

    def breaker(self, name: str) -> WorkerBreaker:
        if name not in self.breakers:
            self.breakers[name] = WorkerBreaker()
            self.breakers[name].note_work(0.0)
        return self.breakers[name]

    def takes(self, name: str, now: float) -> bool:
        """Return whether its breaker lets a request through to the worker."""
        breaker = self.breakers.get(name)
        return breaker is None or breaker.state is BreakerState.CLOSED or breaker.allows(now, 0, True)

    def load_of(self, name: str, report: LoadReport) -> tuple[int, int]:
        """Return the sequences and waiting tokens of a worker: those reported, and those sent since."""
        sent = self._sent_since(name, report.at_s)
        return report.num_sequences + sent.num_sequences, report.num_waiting_tokens + sent.num_prompt_tokens

    def count_sent(self, name: str, report_at_s: float, num_prompt: int) -> None:
        sent = self._sent_since(name, report_at_s)
        self._sent[name] = SentLoad(report_at_s, sent.num_sequences + 1, sent.num_prompt_tokens + num_prompt)

    def _sent_since(self, name: str, report_at_s: float) -> SentLoad:
        sent = self._sent.get(name)
        return sent if sent is not None and sent.reported_at_s >= report_at_s else SentLoad(report_at_s)
