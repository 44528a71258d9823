"""A gateway of a simulated fleet: its own admission, queues and breakers."""

from gateway.link.worker_breaker import WorkerBreaker
from gateway.queue.admission import AdmissionControl
from gateway.queue.waiting_queue import WaitingQueues

MAX_REQUESTS = 100_000  # open in one gateway


class SimulatedGateway:
    """What one gateway keeps."""

    def __init__(self, number: int, clock):
        self.number = number
        self.admission = AdmissionControl(MAX_REQUESTS)
        self.queues = WaitingQueues(MAX_REQUESTS, clock=clock)
        self.breakers: dict[str, WorkerBreaker] = {}
        self.sent: dict[str, tuple[float, int, int]] = {}  # worker -> the report since when, sequences, tokens
        self.has_timer = False  # it asks again soon, for who waits

    def breaker(self, name: str) -> WorkerBreaker:
        if name not in self.breakers:
            self.breakers[name] = WorkerBreaker()
            self.breakers[name].note_work(0.0)
        return self.breakers[name]
