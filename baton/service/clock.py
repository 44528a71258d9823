"""The monotonic clock of this process, and the comparison of two hosts' clocks. The comparison uses messages that are
sent anyway: each exchange carries the four stamps of NTP (RFC 5905 §8).

    ours    sent ──────────────────────────────► received        offset = ((arrived - sent) + (answered - received)) / 2
                ╲                             ╱                 delay = (received - sent) - (answered - arrived)
    theirs        ► arrived ───── answered ────                  the offset is wrong by half the delay at most

The one with the least error of the last eight exchanges counts. Its error grows with its age (15 ppm, PHI of RFC
5905)."""

import time
from collections import deque
from typing import NamedTuple

BEAT_INTERVAL_S = 1.0
FIRST_INTERVAL_S = 0.1  # until there are eight exchanges to choose from
_KEPT = 8
_DRIFT = 15e-6


def now() -> float:
    """Return the time of this process's monotonic clock in seconds, as time.monotonic()."""
    return time.monotonic()


class Offset(NamedTuple):
    """Seconds by which the peer's clock is ahead of ours, and the largest error of that number."""

    offset_s: float
    error_s: float

    @property
    def correction_s(self) -> float:
        """Return the seconds to subtract from the peer's stamps: 0 if both may be one clock."""
        return self.offset_s if abs(self.offset_s) > self.error_s else 0.0


class _Exchange(NamedTuple):
    sent_ns: int
    received_ns: int
    found: Offset

    def aged(self, now_ns: int) -> Offset:
        return Offset(self.found.offset_s, self.found.error_s + _DRIFT * (now_ns - self.received_ns) / 1e9)


class ClockComparison:
    """Compare our clock with the clock of one peer."""

    def __init__(self) -> None:
        self._exchanges: deque[_Exchange] = deque(maxlen=_KEPT)
        self._beat_at = float("-inf")

    def note(self, sent_ns: int, arrived_ns: int, answered_ns: int, received_ns: int) -> None:
        """Record one exchange: the outer stamps are ours, the inner ones the peer's. An exchange with a negative delay
        is ignored, since a clock jumped. If one message has several answers, the quickest counts."""
        delay_ns = (received_ns - sent_ns) - (answered_ns - arrived_ns)
        if delay_ns < 0:
            return
        offset_ns = ((arrived_ns - sent_ns) + (answered_ns - received_ns)) / 2
        exchange = _Exchange(sent_ns, received_ns, Offset(offset_ns / 1e9, delay_ns / 2e9))
        if not self._exchanges or self._exchanges[-1].sent_ns != sent_ns:
            self._exchanges.append(exchange)
        elif exchange.found.error_s < self._exchanges[-1].found.error_s:
            self._exchanges[-1] = exchange

    def offset(self, now_ns: int) -> Offset | None:
        """Return the offset with the least error now; None before the first exchange."""
        return min((each.aged(now_ns) for each in self._exchanges), key=lambda each: each.error_s, default=None)

    @property
    def delay_s(self) -> float:
        """Return the mean round-trip time in seconds; 0 before the first exchange."""
        return 2 * sum(each.found.error_s for each in self._exchanges) / max(1, len(self._exchanges))

    def is_due(self, at: float) -> bool:
        """Return whether another exchange should begin at `at` (monotonic); if so, record that it begins."""
        interval_s = BEAT_INTERVAL_S if len(self._exchanges) == _KEPT else FIRST_INTERVAL_S
        if at - self._beat_at < interval_s:
            return False
        self._beat_at = at
        return True
