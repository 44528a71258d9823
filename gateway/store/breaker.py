"""Stop asking a server that does not answer."""

import logging

from baton.service.clock import now

MAX_FAILURES = 3

log = logging.getLogger(__name__)


class Breaker:
    """A circuit breaker for lookups: open after three failures in a row, closed by a success.

    Of lookups that ran at the same time only the first failure counts."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._failed_at = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether lookups may be made."""
        return self.num_failures < MAX_FAILURES

    def failed(self, began_at: float) -> None:
        """Count the failure of a lookup that began at `began_at`, in time.monotonic()."""
        if began_at < self._failed_at:
            return  # it ran beside the lookup whose failure was counted
        self.num_failures, self._failed_at = self.num_failures + 1, now()
        if self.num_failures == MAX_FAILURES:
            log.warning("redis: lookups are off until it answers again")

    def succeeded(self) -> None:
        """Close the breaker."""
        if not self.is_closed:
            log.info("redis: lookups are on again")
        self.num_failures = 0
