"""Stop asking a server that does not answer."""

import logging

MAX_FAILURES = 3

log = logging.getLogger(__name__)


class Breaker:
    """Open after three failures in a row; a success closes it."""

    def __init__(self) -> None:
        self.num_failures = 0

    @property
    def is_closed(self) -> bool:
        return self.num_failures < MAX_FAILURES

    def failed(self) -> None:
        self.num_failures += 1
        if self.num_failures == MAX_FAILURES:
            log.warning("redis: lookups are off until it answers again")

    def succeeded(self) -> None:
        if not self.is_closed:
            log.info("redis: lookups are on again")
        self.num_failures = 0
