"""Count the workers that died while they served one request: after two, no other worker gets its prompt."""

from typing import NamedTuple

from baton.protocol import ENGINE_FAILED, STEP_FAILED
from baton.service.clock import now
from gateway.link.worker_link import LinkState, WorkerLink

MAX_DEATHS = 2  # workers that died before they completed a step of this request
# If the worker lives and the machine is idle, a broken session is up again after 0.1 s. The worker's next report,
# within 0.25 s, says whether a stall has passed.
_RETURN_S = 1.0
STALLED = "STALLED"  # the reason that this gateway gives when it leaves a worker whose engine does not step
_DEADLY = {ENGINE_FAILED: 1.0, STEP_FAILED: 0.5}  # a step may have failed because of another request in its batch


class _Suspect(NamedTuple):
    """A worker that may have died of the request. `since`: when that was suspected, time.monotonic()."""

    link: WorkerLink
    since: float

    @property
    def is_stalled(self) -> bool:
        return self.link.state is LinkState.STALLED

    @property
    def may_return(self) -> bool:
        """Return whether the worker may be back in a moment: less than _RETURN_S has passed, and no attempt to
        reconnect has failed."""
        return (self.link.is_reconnecting or self.is_stalled) and now() - self.since < _RETURN_S


class SuspectedDeaths:
    """Workers that died, or may have died, of one request."""

    __slots__ = ("_reported", "_suspects")

    def __init__(self) -> None:
        self._reported = 0.0
        self._suspects: dict[bytes, _Suspect] = {}

    def note_reported(self, reason: str) -> None:
        """Count the failure that a worker reported as the reason why it ended the request."""
        self._reported += _DEADLY.get(reason, 0.0)

    def suspect(self, link: WorkerLink, worker_id: bytes) -> None:
        """Count a worker that was lost or stalled, until the same process is back and its engine steps.

        A broken session or a host that is short of cores does not mean that the worker has died."""
        self._suspects[worker_id] = _Suspect(link, now())

    @property
    def exceed_limit(self) -> bool:
        """Return whether enough workers died, as far as is known, to blame the prompt."""
        return self._reported + len(self._missing) >= MAX_DEATHS

    @property
    def are_final(self) -> bool:
        """Return whether no suspected worker may be back in a moment."""
        return not any(each.may_return for each in self._missing)

    @property
    def _missing(self) -> list[_Suspect]:
        """The suspected workers that are not back as the same process with an engine that steps."""
        return [
            each for worker_id, each in self._suspects.items() if each.link.worker_id != worker_id or each.is_stalled
        ]
