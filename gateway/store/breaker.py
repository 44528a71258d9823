"""Stop asking a server that does not answer."""

import logging

from baton.service.clock import now

MAX_FAILURES = 3

log = logging.getLogger(__name__)


class Breaker:
    """Open after three failures in a row, each of a lookup that began behind the last one; a success closes it."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._failed_at = 0.0

    @property
    def is_closed(self) -> bool:
        return self.num_failures < MAX_FAILURES

    def failed(self, began_at: float) -> None:
        """Count the failure of a lookup that began then (time.monotonic())."""
        if began_at < self._failed_at:
            return  # it says no more than the one beside it
        self.num_failures, self._failed_at = self.num_failures + 1, now()
        if self.num_failures == MAX_FAILURES:
            log.warning("redis: lookups are off until it answers again")

    def succeeded(self) -> None:
        if not self.is_closed:
            log.info("redis: lookups are on again")
        self.num_failures = 0
