"""Count the workers that have died of one request: after two its prompt is given to no other."""

from typing import NamedTuple

from baton.protocol import ENGINE_FAILED, STEP_FAILED
from baton.service.clock import now
from gateway.link.worker_link import LinkState, WorkerLink

MAX_DEATHS = 2  # of workers that completed no step of this request
# A session that broke is up again after 0.1 s, where its worker lives and the machine is idle; of a stall that has
# passed the next report tells, within 0.25 s.
_RETURN_S = 1.0
STALLED = "STALLED"  # this gateway's reason for the end of a request whose worker does not step
_DEADLY = {ENGINE_FAILED: 1.0, STEP_FAILED: 0.5}  # a step may have failed for another request in it


class _Suspect(NamedTuple):
    link: WorkerLink
    since: float

    @property
    def is_stalled(self) -> bool:
        return self.link.state is LinkState.STALLED

    @property
    def may_return(self) -> bool:
        """Return whether it may be back in a moment: that was not tried in vain, and no second has passed."""
        return (self.link.is_reconnecting or self.is_stalled) and now() - self.since < _RETURN_S


class Deaths:
    """Of the workers that one request was given to."""

    __slots__ = ("_reported", "_suspects")

    def __init__(self) -> None:
        self._reported = 0.0
        self._suspects: dict[bytes, _Suspect] = {}

    def note_reported(self, reason: str) -> None:
        """Count what a worker says of its end."""
        self._reported += _DEADLY.get(reason, 0.0)

    def suspect(self, link: WorkerLink, worker_id: bytes) -> None:
        """Count a worker that is not heard any more, or does not step, for as long as it is not back as the same
        process and steps: a session may break, or a host be short of cores, and its worker live."""
        self._suspects[worker_id] = _Suspect(link, now())

    @property
    def are_too_many(self) -> bool:
        """Return whether the prompt is to blame, as far as is known."""
        return self._reported + len(self._gone) >= MAX_DEATHS

    @property
    def are_certain(self) -> bool:
        """Return whether none of those that are gone may be back in a moment."""
        return not any(each.may_return for each in self._gone)

    @property
    def _gone(self) -> list[_Suspect]:
        return [
            each for worker_id, each in self._suspects.items() if each.link.worker_id != worker_id or each.is_stalled
        ]
