"""Divide the cores of a host among the workers that compute on it, and lend idle ones to prompts.

On two cores, a worker that computes a prompt with as many threads as cores makes another worker's decoding nine times
as slow (36 ms became 327 for 64 tokens of the demo model: each barrier waits for a thread that has no core). So each
worker has an equal part. But a lone request is computed by one worker after the other, so long steps of a prompt, which
have few barriers, also take the cores of idle workers.

Containers and services may have a quota of CPU time, which the workers inside divide too: a process with more threads
than its quota is stopped for most of each tenth of a second.

The workers of one user share a small file with a number for each, written and read without a lock. A lock on a worker's
byte says that it lives; the lock ends with the process.
"""

import mmap
import os
import time
from pathlib import Path

from baton import system

NUM_SLOTS = 64
# Values of a slot: FREE, or IDLE plus the number of computing threads. The bits above hold the group with a binding
# quota.
FREE, IDLE = 0, 1
_GROUP_BITS = 16
LOOK_S = 1.0  # between two checks for workers that have died


class SharedCores:
    """One worker's part of the cores of its host. Used by one thread at a time."""

    def __init__(self, folder: Path):
        """Join the workers that share a `folder` and may use the same cores. Raises OSError, also if all slots are
        taken."""
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
            system.reserve(self._fd, 4 * NUM_SLOTS)
            self._own = next((slot for slot in range(NUM_SLOTS) if system.lock_byte(self._fd, slot)), NUM_SLOTS)
            if self._own == NUM_SLOTS:
                raise OSError(f"all {NUM_SLOTS} slots are taken")
            self._slots = memoryview(mmap.mmap(self._fd, 4 * NUM_SLOTS)).cast("I")
        except OSError as error:
            os.close(self._fd)
            raise OSError(f"{path}: {error.strerror or error}") from error
        self._looked_at = 0.0
        self.rest()

    @property
    def share(self) -> int:
        """The threads that this worker always has: an equal part of the cores."""
        self._clear_dead()
        return self._part(self._others())

    def claim(self, is_long: bool) -> int:
        """Return how many threads compute the next step, and tell the other workers. A long step may take idle cores
        too."""
        if time.monotonic() - self._looked_at > LOOK_S:
            self._clear_dead()
        others = self._others()
        num_threads = self._part(others)
        if is_long:
            idle = self._host_cores - _computing(others), self.num_cores - _computing(self._within(others))
            num_threads = max(num_threads, min(idle))
        self._slots[self._own] = self._group | (IDLE + num_threads)
        return num_threads

    def rest(self) -> None:
        """Tell the other workers that this one is idle."""
        self._slots[self._own] = self._group | IDLE

    def close(self) -> None:
        """Leave: the other workers divide the cores."""
        self._slots[self._own] = FREE
        os.close(self._fd)

    def _part(self, others: list[int]) -> int:
        return max(1, min(self._host_cores // (1 + len(others)), self.num_cores // (1 + len(self._within(others)))))

    def _within(self, others: list[int]) -> list[int]:
        """Return the workers with the same quota as this one, or all without a quota if it has none."""
        return [value for value in others if value >> _GROUP_BITS << _GROUP_BITS == self._group]

    def _others(self) -> list[int]:
        return [value for slot, value in enumerate(self._slots.tolist()) if value != FREE and slot != self._own]

    def _clear_dead(self) -> None:
        self._looked_at = time.monotonic()
        for slot, value in enumerate(self._slots.tolist()):
            if value != FREE and slot != self._own and system.lock_byte(self._fd, slot):
                self._slots[slot] = FREE
                system.unlock_byte(self._fd, slot)


def _computing(slots: list[int]) -> int:
    """Return how many threads these workers compute with."""
    return sum((slot & ((1 << _GROUP_BITS) - 1)) - IDLE for slot in slots)
