"""Count the workers that have died of one request: after two its prompt is given to no other."""

from gateway.link.worker_link import WorkerLink

MAX_DEATHS = 2  # of workers that completed no step of this request
_DEADLY = {"ENGINE_FAILED": 1.0, "STALLED": 1.0, "STEP_FAILED": 0.5}  # a step may have failed for another request in it


class Deaths:
    """Of the workers that one request was given to."""

    def __init__(self) -> None:
        self._reported = 0.0
        self._suspects: dict[bytes, WorkerLink] = {}

    def note_reported(self, reason: str) -> None:
        """Count what a worker says of its end."""
        self._reported += _DEADLY.get(reason, 0.0)

    def suspect(self, link: WorkerLink, worker_id: bytes) -> None:
        """Count a worker that is not heard any more, for as long as it is not back as the same process: a session may break
        and its worker live."""
        self._suspects[worker_id] = link

    @property
    def are_too_many(self) -> bool:
        """Return whether the prompt is to blame."""
        num_gone = sum(link.worker_id != worker_id for worker_id, link in self._suspects.items())
        return self._reported + num_gone >= MAX_DEATHS
