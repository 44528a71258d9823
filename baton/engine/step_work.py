"""Count the work of steps from their slices (weight reads, tokens, attention), and tokens a second."""

import time
from collections import deque
from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from baton.engine.schedule.steps import Slice

WINDOW_S = 5  # whole seconds, those before the present one
RATE_S = 1.0


class WorkRates(NamedTuple):
    """Work a second, averaged over WINDOW_S; idle seconds count as zero."""

    steps: float = 0.0
    tokens: float = 0.0
    rows: float = 0.0  # of logits that tokens were drawn from, one a slice
    pairs: float = 0.0  # of a token and a position that it attends to
    kv_tokens: float = 0.0  # KV read (each sequence's context once a step) and written


class StepWork:
    """Sums of the work of recent steps, a second each. Written by the loop's thread, read by any."""

    def __init__(self):
        self._seconds: deque[tuple[int, list[int]]] = deque(maxlen=WINDOW_S + 1)

    def add(self, slices: Iterable[Slice], num_steps: int = 1) -> None:
        """Count one step, or `num_steps` decode steps in which every slice moves on by a token."""
        num_tokens = num_rows = num_pairs = num_kv = 0
        for step, (seq, begin, end) in product(range(num_steps), slices):
            begin, end = begin + step, end + step + len(seq.draft_ids)
            num_rows += 1
            num_tokens += end - begin
            num_pairs += (end - begin) * (begin + end + 1) // 2
            num_kv += 2 * end - begin
        second = int(time.monotonic())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, [0] * len(WorkRates._fields)))
        sums = self._seconds[-1][1]
        for index, num in enumerate((num_steps, num_tokens, num_rows, num_pairs, num_kv)):
            sums[index] += num

    def rates(self) -> WorkRates:
        """Return the average work a second over the last WINDOW_S seconds."""
        second = int(time.monotonic())
        recent = [sums for at, sums in list(self._seconds) if second - WINDOW_S <= at < second]
        return WorkRates(*(sum(column) / WINDOW_S for column in zip(*recent, strict=True))) if recent else WorkRates()


class Rate:
    """The rate of tokens over the last RATE_S. Written by one thread, read by any, as of the last write."""

    def __init__(self):
        self._counts: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._last = 0.0

    def add(self, num: int) -> None:
        now = time.monotonic()
        self._counts.append((now, num))
        self._sum += num
        self._last = now
        while self._counts[0][0] <= now - RATE_S:
            self._sum -= self._counts.popleft()[1]

    def per_s(self) -> float:
        return self._sum / RATE_S if time.monotonic() - self._last < RATE_S else 0.0
