"""Choose how many threads compute a step: all that the engine has, or for short steps perhaps one fewer.

All threads are faster for long steps. In a step of a millisecond, other work (the event loop that sends its tokens, the
client) takes the core of one computing thread, and all others wait for that thread. Beside a gateway and a client on
two cores, one thread decoded the demo model 1.5 times as fast as two; with 16 sequences of a larger model, two threads
were 1.5 times as fast as one. So both are measured by the wall time of this engine's own steps, for each number of rows
(powers of two), and the slower choice is tried again ever more rarely. For prompts of the demo model, two threads took
1.3 times as long as one with 64 tokens, and were 1.1 times as fast with 256 and 1.6 times with 512. The bits of results
do not depend on the number of threads.
"""

import statistics
import time
from collections import deque

import torch

from baton.engine.core.shared_cores import SharedCores

SHORT_ROWS = 32  # up to so many rows a step's time hardly depends on them, and it takes no idle cores of other workers
MAX_ROWS = 256  # longer steps are computed by all threads
LAST = 5  # the median of the last times counts
TRY_CALLS = 3  # calls of a trial; the first one starts or stops a thread and does not count
FIRST_INTERVAL, LAST_INTERVAL = 32, 4096  # calls between two trials: doubled after each trial that changed nothing


class _CallTimes:
    """Recent times of calls with one number of rows, with all threads and with one fewer, and the present choice."""

    __slots__ = ("times", "fewer", "interval", "num_left", "trial")

    def __init__(self) -> None:
        self.times = {is_fewer: deque[float](maxlen=LAST) for is_fewer in (False, True)}
        self.fewer = False
        self.interval = self.num_left = FIRST_INTERVAL  # calls until the next trial
        self.trial = 0  # remaining calls of the present trial

    def next(self) -> bool:
        """Return whether the next call uses one thread fewer."""
        if not self.trial and self.num_left <= 0:
            self.trial = TRY_CALLS
            self.times[not self.fewer].clear()
        return self.fewer != bool(self.trial)

    def add(self, seconds: float) -> None:
        """Add the seconds of a call, for each step, or for each row of long steps."""
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
    """Sets the number of threads of each call. Belongs to the loop's thread."""

    def __init__(self, num_threads: int, is_measured: bool = True):
        """Take the engine's number of threads; with `is_measured`, short steps may use one fewer."""
        self._num_threads, self._is_measured = num_threads, is_measured
        self._cores: SharedCores | None = None
        # by the number of threads, and of rows in powers of two
        self._choices: dict[tuple[int, int], _CallTimes] = {}
        self._choice: _CallTimes | None = None  # of the running call
        self._num_rows, self._begun = 0, 0.0

    def share(self, cores: SharedCores) -> None:
        """Use as many threads as the other workers of this host leave, from now on."""
        self._cores = cores

    @property
    def most(self) -> int:
        """The most threads that compute a step."""
        return self._num_threads if self._cores is None else self._cores.num_cores

    def begin(self, num_rows: int) -> None:
        """Set the threads for a call whose steps have `num_rows` rows each."""
        if self._cores is not None:
            self._num_threads = self._cores.claim(is_long=num_rows > SHORT_ROWS)
        elif self._num_threads == 1:
            return
        is_chosen = num_rows <= MAX_ROWS and self._is_measured and self._num_threads > 1
        self._choice = (
            self._choices.setdefault((self._num_threads, num_rows.bit_length()), _CallTimes()) if is_chosen else None
        )
        _set(self._num_threads - (self._choice is not None and self._choice.next()))
        self._num_rows, self._begun = num_rows, time.perf_counter()

    def end(self, num_steps: int) -> None:
        """Add the time of the call, which computed `num_steps` steps, and set all threads again."""
        if self._choice is not None:
            _set(self._num_threads)
            num_rows = self._num_rows if self._num_rows > SHORT_ROWS else 1
            self._choice.add((time.perf_counter() - self._begun) / (num_steps * num_rows))

    def rest(self) -> None:
        """Tell other workers that nothing is computed now."""
        if self._cores is not None:
            self._cores.rest()


def _set(num_threads: int) -> None:
    if num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)
