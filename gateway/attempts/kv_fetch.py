"""The fetch of a prompt's KV from the prefill worker to the decode worker, and the lease that keeps it there."""

import math

from baton.service.clock import now

_RENEW_S = 1.5  # a lease is renewed this often; it lasts for LEAST_LEASE_S (baton/worker/settings.py) or longer
_DOUBT_S = 1.0  # how long a fetch may still take once the session with its source is lost


class KVFetch:
    """Whether the KV has arrived, and until when it may take. Times are time.monotonic()."""

    __slots__ = ("is_done", "lease_id", "renew_at", "give_up_at")

    def __init__(self) -> None:
        self.is_done = False
        self.lease_id = b""  # empty: the prefill worker keeps nothing
        self.renew_at = 0.0  # when the lease is to be renewed
        self.give_up_at = math.inf  # when the fetch is given up since its source may be gone

    @property
    def is_in_doubt(self) -> bool:
        """Return whether the source of an unfinished fetch may be gone."""
        return self.give_up_at < math.inf and not self.is_done

    @property
    def due(self) -> float:
        """When a doubtful fetch is given up, or else the lease is renewed; never without either."""
        if self.is_done:
            return math.inf
        if self.give_up_at < math.inf:
            return self.give_up_at
        return self.renew_at if self.lease_id else math.inf

    def begin(self, lease_id: bytes) -> None:
        """Begin with the lease that the prefill worker granted."""
        self.lease_id = lease_id
        self.note_renewed()

    def note_renewed(self) -> None:
        """Set when to renew the lease again."""
        self.renew_at = now() + _RENEW_S

    def doubt(self) -> None:
        """Bound an unfinished fetch to _DOUBT_S from now on; further calls do not extend the time."""
        if not self.is_done and self.give_up_at == math.inf:
            self.give_up_at = now() + _DOUBT_S
