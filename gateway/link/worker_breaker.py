"""Stop sending requests to a worker that does not answer them: it looks idle, and would attract all requests.

    new ─ work ─► closed ─ two failures in a row ─► open ─ pause over: one request at a time ─ work ─► closed
     └─ a failure ─► open                             ▲                                      └ a failure ─┐
                                                      └──────────────── twice the pause ◄─────────────────┘

A failure is an Admit or Prefill that is not answered in time, or that the worker ends although nothing is wrong with
the request. Work, that is a prompt that was read or a token, closes the breaker. Only a success, that is a request
served to its end, makes the breaker forget earlier failures, since garbage may follow a first token.
"""

from enum import Enum

_MAX_FAILURES = 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # a probe costs one request its wait for the answer


class BreakerState(Enum):
    """States of a breaker: a closed one lets requests through, an open one none."""

    NEW = "new"  # nothing is known of the worker: it gets one request at a time while others are proven
    CLOSED = "closed"
    OPEN = "open"


class WorkerBreaker:
    """The circuit breaker of one worker, over all requests. Times are time.monotonic()."""

    def __init__(self) -> None:
        self.state = BreakerState.NEW
        self.retry_at = 0.0  # when an open breaker lets a request through
        self._num_failures, self._pause_s, self._failed_at = 0, _FIRST_PAUSE_S, 0.0

    def note_work(self, asked_at: float) -> bool:
        """Count work on a request that was sent at `asked_at`, unless the worker has failed since. Return whether the
        breaker closes."""
        if asked_at < self._failed_at:
            return False
        was_closed, self.state = self.state is BreakerState.CLOSED, BreakerState.CLOSED
        return not was_closed

    def note_success(self, asked_at: float) -> None:
        """Forget failures: a request that was sent at `asked_at` was served to its end."""
        if asked_at >= self._failed_at:
            self._num_failures, self._pause_s = 0, _FIRST_PAUSE_S

    def note_failure(self, at: float) -> bool:
        """Count a failure; return whether the breaker opens. Failures of older requests while it is open do not
        count."""
        if self.state is BreakerState.OPEN and at < self.retry_at:
            return False
        self._num_failures += 1
        self._failed_at = at
        if self.state is BreakerState.CLOSED and self._num_failures < _MAX_FAILURES:
            return False
        self.state, self.retry_at = BreakerState.OPEN, at + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True

    def allows(self, at: float, num_asked: int, are_others_proven: bool) -> bool:
        """Return whether to send this worker one more request, while it has `num_asked` requests that show no work yet.

        If no other worker is proven, a new one gets any number: a stack whose workers are all new begins at full
        speed."""
        if self.state is BreakerState.OPEN:
            return at >= self.retry_at and not num_asked
        return self.state is BreakerState.CLOSED or not num_asked or not are_others_proven
