"""Tokens per second over the last second."""

import time
from collections import deque

WINDOW_S = 1.0


class Rate:
    """Written by one thread; read by any (a reader sees the sum as of the last write)."""

    def __init__(self):
        self._counts: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._last = 0.0

    def add(self, num: int) -> None:
        now = time.monotonic()
        self._counts.append((now, num))
        self._sum += num
        self._last = now
        while self._counts[0][0] <= now - WINDOW_S:
            self._sum -= self._counts.popleft()[1]

    def per_s(self) -> float:
        return self._sum / WINDOW_S if time.monotonic() - self._last < WINDOW_S else 0.0
