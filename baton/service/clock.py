"""The clock of this process; and clocks of two hosts, compared over messages that pass anyway: each exchange has the
four stamps of NTP (RFC 5905 §8).

    ours    sent ──────────────────────────────► received        offset = ((arrived - sent) + (answered - received)) / 2
                 ╲                             ╱                 delay = (received - sent) - (answered - arrived)
    theirs        ► arrived ───── answered ────                  the offset is wrong by half the delay at most

Of the last eight exchanges the one with the least error counts, which grows with its age (15 ppm, PHI of RFC 5905).
"""

import time
from collections import deque
from typing import NamedTuple

BEAT_INTERVAL_S = 1.0
FIRST_INTERVAL_S = 0.1  # until there are eight to choose from
_KEPT = 8
_DRIFT = 15e-6


def now() -> float:
    return time.monotonic()


class Offset(NamedTuple):
    """Seconds by which another clock is ahead of ours, and the error of that."""

    offset_s: float
    error_s: float

    @property
    def correction_s(self) -> float:
        """Return the seconds to subtract from the other's stamps: 0 where the two may be one clock."""
        return self.offset_s if abs(self.offset_s) > self.error_s else 0.0


class _Exchange(NamedTuple):
    sent_ns: int
    received_ns: int
    found: Offset

    def aged(self, now_ns: int) -> Offset:
        return Offset(self.found.offset_s, self.found.error_s + _DRIFT * (now_ns - self.received_ns) / 1e9)


class ClockComparison:
    """Compare our clock with that of one peer."""

    def __init__(self) -> None:
        self._exchanges: deque[_Exchange] = deque(maxlen=_KEPT)
        self._beat_at = float("-inf")

    def note(self, sent_ns: int, arrived_ns: int, answered_ns: int, received_ns: int) -> None:
        """One exchange: our stamps outside, theirs inside. One that took less than nothing is ignored: a clock jumped.
        Of several answers to one message the quickest counts."""
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
        """The best that is known; None before the first exchange."""
        return min((each.aged(now_ns) for each in self._exchanges), key=lambda each: each.error_s, default=None)

    @property
    def delay_s(self) -> float:
        """Return the mean seconds of the way there and back; 0 before the first exchange."""
        return 2 * sum(each.found.error_s for each in self._exchanges) / max(1, len(self._exchanges))

    def is_due(self, at: float) -> bool:
        """Return whether another exchange should begin at `at` (monotonic); True begins it."""
        interval_s = BEAT_INTERVAL_S if len(self._exchanges) == _KEPT else FIRST_INTERVAL_S
        if at - self._beat_at < interval_s:
            return False
        self._beat_at = at
        return True
