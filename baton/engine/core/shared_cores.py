"""Divide the cores of a host among the workers that compute on them, and lend to prompts those that others leave idle.

On two cores a worker that reads a prompt beside another one with as many threads as cores makes its decoding nine times
as slow (36 ms became 327 for 64 tokens of the demo model: each barrier waits for a thread that has no core). So each
worker has its part; but a lone request is computed by one worker after the other, and the long steps of a prompt, whose
few barriers wait well, take the cores of those that have nothing to do, too.

Containers, and services, may have a quota of the cores' time, which those within divide as well: whoever computes by
more threads is stopped for most of each tenth of a second.

The workers meet in a small file of one user: a number for each, by itself written and read without a lock. A lock on
its byte says that the worker lives; it ends with the process, however that ends.
"""

import mmap
import os
import time
from pathlib import Path

from baton import system

NUM_PLACES = 64
# Of a place; from IDLE on the number of threads that compute. Above these bits, where a quota binds, the group that has
# it.
FREE, IDLE = 0, 1
_GROUP_BITS = 16
LOOK_S = 1.0  # between two looks for places of workers that have died


class SharedCores:
    """One worker's place among those of its host. Used by one thread at a time."""

    def __init__(self, folder: Path):
        """The workers that share a `folder`, and may use the same cores, divide them. Raises OSError, also where all
        places are taken."""
        cores, quota = system.cores(), system.cpu_quota()
        mask = sum(1 << core for core in cores)
        path = folder / f"baton-cores-{os.getuid()}-{mask:x}"
        self._host_cores = self.num_cores = len(cores)
        self._group = 0
        if quota is not None and quota.cores < len(cores):
            self.num_cores = quota.cores
            self._group = (quota.group % ((1 << _GROUP_BITS) - 1) + 1) << _GROUP_BITS
        self._fd = system.open_own(path)
        try:
            system.reserve(self._fd, 4 * NUM_PLACES)
            self._own = next((place for place in range(NUM_PLACES) if system.lock_byte(self._fd, place)), NUM_PLACES)
            if self._own == NUM_PLACES:
                raise OSError(f"all {NUM_PLACES} places are taken")
            self._places = memoryview(mmap.mmap(self._fd, 4 * NUM_PLACES)).cast("I")
        except OSError as error:
            os.close(self._fd)
            raise OSError(f"{path}: {error.strerror or error}") from error
        self._looked_at = 0.0
        self.rest()

    @property
    def share(self) -> int:
        """Threads that this worker has in any case: an equal part of the cores."""
        self._clear_dead()
        return self._part(self._others())

    def take(self, is_long: bool) -> int:
        """Return by how many threads the next step is computed, and tell the others. `is_long`: it may take what they
        leave idle."""
        if time.monotonic() - self._looked_at > LOOK_S:
            self._clear_dead()
        others = self._others()
        num_threads = self._part(others)
        if is_long:
            idle = self._host_cores - _computing(others), self.num_cores - _computing(self._within(others))
            num_threads = max(num_threads, min(idle))
        self._places[self._own] = self._group | (IDLE + num_threads)
        return num_threads

    def rest(self) -> None:
        """Tell the others that nothing is computed here."""
        self._places[self._own] = self._group | IDLE

    def close(self) -> None:
        """Leave; the cores are divided among the others."""
        self._places[self._own] = FREE
        os.close(self._fd)

    def _part(self, others: list[int]) -> int:
        return max(1, min(self._host_cores // (1 + len(others)), self.num_cores // (1 + len(self._within(others)))))

    def _within(self, others: list[int]) -> list[int]:
        """Return those that have this worker's quota; where it has none, those that have none either."""
        return [value for value in others if value >> _GROUP_BITS << _GROUP_BITS == self._group]

    def _others(self) -> list[int]:
        return [value for place, value in enumerate(self._places.tolist()) if value != FREE and place != self._own]

    def _clear_dead(self) -> None:
        self._looked_at = time.monotonic()
        for place, value in enumerate(self._places.tolist()):
            if value != FREE and place != self._own and system.lock_byte(self._fd, place):
                self._places[place] = FREE
                system.unlock_byte(self._fd, place)


def _computing(places: list[int]) -> int:
    """Return by how many threads these compute."""
    return sum((place & ((1 << _GROUP_BITS) - 1)) - IDLE for place in places)
