"""Measure how busy the cores are that this process may use, whatever runs on them, or how much of its CPU quota is
used."""

import time
from pathlib import Path

from baton import system

_STAT = Path("/proc/stat")
_LEAST_S = 1.0  # between two measurements: the kernel counts in hundredths of a second
_IDLE = slice(3, 5)  # idle and iowait, in the columns of /proc/stat
_COUNTED = 8  # columns that count; those after them are guest time, which user time already has


class CpuUsage:
    """Measures the time since the previous measurement, or since its creation."""

    def __init__(self) -> None:
        self._at, (self._idle, self._total) = time.monotonic(), _ticks()
        self._throttled, self._periods = system.throttled_periods()
        self._busy = 0.0

    @property
    def num_cores(self) -> int:
        return system.num_cores()

    def busy(self) -> float:
        """Return the busy share since the last measurement, 0 to 1. Within a second the last result is repeated. 0 if
        the system does not tell. A quota that was used up in each period counts as busy, however idle the host is."""
        if (at := time.monotonic()) - self._at >= _LEAST_S:
            (idle, total), (throttled, periods) = _ticks(), system.throttled_periods()
            of_host = 1.0 - (idle - self._idle) / (total - self._total) if total > self._total else 0.0
            of_quota = (throttled - self._throttled) / max(1, periods - self._periods)
            self._busy = max(of_host, of_quota)
            self._at, self._idle, self._total, self._throttled, self._periods = at, idle, total, throttled, periods
        return self._busy


def _ticks() -> tuple[int, int]:
    """Return the idle ticks and all ticks of the cores that this process may use."""
    own = {f"cpu{core}" for core in system.cores()}
    try:
        rows = [line.split() for line in _STAT.read_text().splitlines()]
    except OSError:
        return 0, 0
    columns = [[int(each) for each in row[1 : 1 + _COUNTED]] for row in rows if row and row[0] in own]
    return sum(sum(each[_IDLE]) for each in columns), sum(map(sum, columns))
