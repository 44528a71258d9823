"""The prefix index: which worker holds which spans, a hint for routing and never a promise. Owners compare the full
hash again."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from baton.v1 import worker_pb2 as pb
from gateway.prefix.prefix_matches import Matches


class SecretDiffers(Exception):
    """Gateways with another cluster secret share this index."""


class PrefixIndex(Protocol):
    """Belongs to the event loop. A worker is (instance, epoch) in bytes."""

    @property
    def down(self) -> str:
        """The reason why lookups find nothing at present; empty while they work."""
        ...

    async def lookup(self, hashes: Sequence[bytes]) -> Matches:
        """Return which workers hold how many of the leading `hashes`. Takes 50 ms at most; any failure means none."""
        ...

    def join(self, worker: bytes, subscribe: Callable[[], None]) -> None:
        """Add a worker that serves now. `subscribe()` asks it for index events, a snapshot first."""

    def apply(self, worker: bytes, events: pb.BlockEvents) -> None:
        """Take the events of a worker."""

    def drop(self, worker: bytes) -> None:
        """Remove a worker whose session has ended."""

    async def check_secret(self, fingerprint: bytes) -> None:
        """Name the cluster secret in use here. Raises SecretDiffers."""

    async def run(self) -> None:
        """Keep the index, until cancelled."""


class Change(NamedTuple):
    """Spans that a worker holds now and did not before, and the other way round."""

    sealed: Sequence[bytes]
    evicted: Sequence[bytes]


class Feed:
    """The numbered index events of one worker, and the spans it holds after them."""

    def __init__(self, subscribe: Callable[[], None]):
        self.spans: set[bytes] = set()
        self._subscribe = subscribe
        self._next_seq: int | None = None  # None: only a snapshot will do

    def join(self, subscribe: Callable[[], None]) -> None:
        """Begin another session of the worker; what it held at the end of the last one is still known."""
        self._subscribe, self._next_seq = subscribe, None

    def subscribe(self) -> None:
        """Ask for a snapshot."""
        self._next_seq = None
        self._subscribe()

    def apply(self, events: pb.BlockEvents) -> Change:
        """Return what has changed. After a gap in the numbers nothing has, and a snapshot is asked for."""
        if events.snapshot:
            held = set(events.sealed)
            change = Change(tuple(held - self.spans), tuple(self.spans - held))
            self.spans = held
        elif events.seq == self._next_seq:
            change = Change(events.sealed, events.evicted)
            self.spans.update(events.sealed)
            self.spans.difference_update(events.evicted)
        else:
            if self._next_seq is not None:
                self.subscribe()
            return Change((), ())
        self._next_seq = events.seq + 1
        return change
