"""The prefix index in memory: what the workers report to this gateway alone."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from baton.v1 import worker_pb2 as pb
from gateway.prefix.prefix_index import Feed
from gateway.prefix.prefix_matches import NO_WORKERS, Matches, WorkerBits


class MemoryIndex:
    """A PrefixIndex in which the holders of a span are the bits of one integer."""

    def __init__(self) -> None:
        self._feeds: dict[bytes, Feed] = {}
        self._worker_bits: WorkerBits = NO_WORKERS
        self._holders: dict[bytes, int] = {}

    down = ""

    async def lookup(self, hashes: Sequence[bytes]) -> Matches:
        holders = self._holders
        return Matches((holders.get(value, 0) for value in hashes), self._worker_bits)

    def join(self, worker: bytes, subscribe: Callable[[], None]) -> None:
        self.drop(worker)
        taken = self._worker_bits.worker_at
        bit = next(bit for bit in range(len(taken) + 1) if bit not in taken)
        self._worker_bits = WorkerBits.of({**taken, bit: worker})
        self._feeds[worker] = feed = Feed(subscribe)
        feed.subscribe()

    def apply(self, worker: bytes, events: pb.BlockEvents) -> None:
        if feed := self._feeds.get(worker):
            change = feed.apply(events)
            mask = 1 << self._worker_bits.bit_of[worker]
            for span in change.sealed:
                self._holders[span] = self._holders.get(span, 0) | mask
            self._forget(worker, change.evicted)

    def drop(self, worker: bytes) -> None:
        if feed := self._feeds.pop(worker, None):
            self._forget(worker, feed.spans)
            gone = self._worker_bits.bit_of[worker]
            self._worker_bits = WorkerBits.of(
                {bit: each for bit, each in self._worker_bits.worker_at.items() if bit != gone}
            )

    async def check_secret(self, fingerprint: bytes) -> None:
        """Do nothing: there are no other gateways."""

    async def run(self) -> None:
        """Wait until cancelled: nothing is kept elsewhere."""
        await asyncio.get_running_loop().create_future()

    def _forget(self, worker: bytes, spans: Iterable[bytes]) -> None:
        mask = 1 << self._worker_bits.bit_of[worker]
        for span in spans:
            if left := self._holders.get(span, 0) & ~mask:
                self._holders[span] = left
            else:
                self._holders.pop(span, None)
