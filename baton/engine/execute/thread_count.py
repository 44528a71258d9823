"""Choose how many threads compute a step: those that the engine has, and of a short one perhaps one fewer.

All are faster where a step is long. Where it takes a millisecond, who else wants a core (the event loop that sends its
tokens, the client) holds up the thread that computes there, and with it all that wait for it: beside a gateway and a
client on two cores one thread decoded the demo model 1.5 times as fast as two, and 16 sequences of a larger model two
threads 1.5 times as fast as one. So both are measured, by the wall time of this engine's own steps, by the number of
their rows (powers of two), and the slower one is tried again ever more seldom. A prompt of 64 tokens of the demo model
two threads read 1.3 times as slowly as one, one of 256 1.1 times and one of 512 1.6 times as fast. The bits do not
depend on the number of threads.
"""

import statistics
import time
from collections import deque

import torch

from baton.engine.core.shared_cores import SharedCores

SHORT_ROWS = 32  # of a step: up to here its time hardly depends on them, and it takes no idle cores
MAX_ROWS = 256  # what is longer is computed by all
LAST = 5  # times of each that count, the median of them
TRY_CALLS = 3  # running, before it is judged; the first one wakes or dismisses a thread and is not counted
FIRST_INTERVAL, LAST_INTERVAL = 32, 4096  # calls between two tries: twice as many after each that changed nothing


class _CallTimes:
    """Of one number of rows: what calls took lately with all threads and with one fewer, and which is used."""

    __slots__ = ("times", "fewer", "interval", "num_left", "trial")

    def __init__(self) -> None:
        self.times = {is_fewer: deque[float](maxlen=LAST) for is_fewer in (False, True)}
        self.fewer = False
        self.interval = self.num_left = FIRST_INTERVAL  # calls until the next try
        self.trial = 0  # calls of it that are to come

    def next(self) -> bool:
        """Return whether the next call is computed by fewer threads."""
        if not self.trial and self.num_left <= 0:
            self.trial = TRY_CALLS
            self.times[not self.fewer].clear()
        return self.fewer != bool(self.trial)

    def add(self, seconds: float) -> None:
        """Add what the call took, by the step, or by the row of long steps."""
        if not self.trial:
            self.times[self.fewer].append(seconds)
            self.num_left -= 1
            return
        if self.trial < TRY_CALLS:
            self.times[not self.fewer].append(seconds)
        self.trial -= 1
        if not self.trial:
            self._judge()

    def _judge(self) -> None:
        used, other = (statistics.median(self.times[each]) for each in (self.fewer, not self.fewer))
        if other < used:
            self.fewer, self.interval = not self.fewer, FIRST_INTERVAL
        else:
            self.interval = min(2 * self.interval, LAST_INTERVAL)
        self.num_left = self.interval


class ThreadCount:
    """Belongs to the loop's thread, whose number of threads it sets."""

    def __init__(self, num_threads: int, is_measured: bool = True):
        """`num_threads`: those that the engine has; `is_measured`: a short step may be computed by one fewer."""
        self._num_threads, self._is_measured = num_threads, is_measured
        self._cores: SharedCores | None = None
        # By the number of threads, and that of rows in powers of two.
        self._choices: dict[tuple[int, int], _CallTimes] = {}
        self._choice: _CallTimes | None = None  # of the call that runs
        self._num_rows, self._begun = 0, 0.0

    def share(self, cores: SharedCores) -> None:
        """Have as many threads as the workers of this host leave, from now on."""
        self._cores = cores

    @property
    def most(self) -> int:
        """Return how many threads a step is computed by at most."""
        return self._num_threads if self._cores is None else self._cores.num_cores

    def begin(self, num_rows: int) -> None:
        """Choose for a call whose steps have `num_rows` rows each."""
        if self._cores is not None:
            self._num_threads = self._cores.take(is_long=num_rows > SHORT_ROWS)
        elif self._num_threads == 1:
            return
        is_chosen = num_rows <= MAX_ROWS and self._is_measured and self._num_threads > 1
        self._choice = (
            self._choices.setdefault((self._num_threads, num_rows.bit_length()), _CallTimes()) if is_chosen else None
        )
        _set(self._num_threads - (self._choice is not None and self._choice.next()))
        self._num_rows, self._begun = num_rows, time.perf_counter()

    def end(self, num_steps: int) -> None:
        """Measure the call, of as many steps; what comes behind it is computed by all again."""
        if self._choice is not None:
            _set(self._num_threads)
            num_rows = self._num_rows if self._num_rows > SHORT_ROWS else 1
            self._choice.add((time.perf_counter() - self._begun) / (num_steps * num_rows))

    def rest(self) -> None:
        """Nothing is to be computed now."""
        if self._cores is not None:
            self._cores.rest()


def _set(num_threads: int) -> None:
    if num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)
