"""Matches of one prompt: which worker holds how much of it.

Each worker is a bit, so a lookup costs the same however many workers hold the beginning: if all prompts begin alike,
that is the whole fleet.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple


class WorkerBits(NamedTuple):
    """The bit of each worker. Never changed, since matches refer to it."""

    worker_at: Mapping[int, bytes]
    bit_of: Mapping[bytes, int]
    mask: int

    @classmethod
    def of(cls, worker_at: Mapping[int, bytes]) -> "WorkerBits":
        """Return the WorkerBits of workers by bit."""
        bit_of = {worker: bit for bit, worker in worker_at.items()}
        return cls(worker_at, bit_of, sum(1 << bit for bit in worker_at))


NO_WORKERS = WorkerBits.of({})
_RNG = random.Random()
_FEW = 64  # more workers than a request looks at


class Matches(Mapping[bytes, int]):
    """A mapping from a worker to the number of leading spans that it holds, the most first. Belongs to one request."""

    __slots__ = ("_workers", "_rng", "_first", "_levels")

    def __init__(self, holders_of: Iterable[int] = (), workers: WorkerBits = NO_WORKERS, rng: random.Random = _RNG):
        """Find the matches of spans. `holders_of`: the bits of the holders of each span from the first on, read as far
        as needed.

        Workers that hold equally many are listed from a random one on; otherwise all requests would choose the same
        worker."""
        self._workers, self._rng = workers, rng
        self._first: dict[bytes, int] = {}  # those that hold most, one by one
        self._levels = _levels(holders_of, workers.mask)
        while self._levels and self._levels[0][1].bit_count() + len(self._first) <= _FEW:
            self._first |= self._of_level(*self._levels.pop(0))

    def note(self, worker: bytes, num_spans: int) -> None:
        """Note that a worker holds `num_spans`, which is more than all others hold."""
        self._first.pop(worker, None)
        self._first = {worker: num_spans, **self._first}

    def get(self, worker: bytes, default: int = 0) -> int:
        """Return how many leading spans this worker holds."""
        if worker in self._first:
            return self._first[worker]
        bit = self._workers.bit_of.get(worker) if self._levels else None
        if bit is not None:
            for num_spans, bits in self._levels:
                if bits >> bit & 1:
                    return num_spans
        return default

    def __getitem__(self, worker: bytes) -> int:
        if num_spans := self.get(worker):
            return num_spans
        raise KeyError(worker)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._first
        for level in self._levels:
            yield from (worker for worker, _ in self._of_level(*level) if worker not in self._first)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _of_level(self, num_spans: int, bits: int) -> Iterator[tuple[bytes, int]]:
        for bit in _set_bits(bits, self._rng.randrange(bits.bit_length())):
            yield self._workers.worker_at[bit], num_spans


def _levels(holders_of: Iterable[int], alive: int) -> list[tuple[int, int]]:
    """Return pairs (number of leading spans, bits of the workers that hold exactly so many), the most spans first."""
    levels, num_spans = [], 0
    for bits in holders_of if alive else ():
        going_on = alive & bits
        if going_on != alive:
            if num_spans:
                levels.append((num_spans, alive ^ going_on))
            alive = going_on
            if not alive:
                break
        num_spans += 1
    if alive and num_spans:
        levels.append((num_spans, alive))
    return levels[::-1]


def _set_bits(bits: int, begin: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, those from `begin` on first."""
    above = bits >> begin << begin
    for part in (above, bits ^ above):
        while part:
            lowest = part & -part
            yield lowest.bit_length() - 1
            part ^= lowest
