"""The prefix index: which worker holds which spans. It is a hint for routing and no promise: the worker compares the
full hash again."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from baton.v1 import worker_pb2 as pb
from gateway.prefix.prefix_matches import Matches


class SecretDiffers(Exception):
    """Another gateway on this index has another cluster secret."""


class PrefixIndex(Protocol):
    """Look up which workers hold a prompt's spans. Belongs to the event loop. A worker is (instance, epoch) in
    bytes."""

    @property
    def down(self) -> str:
        """The reason why lookups find nothing at present; empty while they work."""
        ...

    async def lookup(self, hashes: Sequence[bytes]) -> Matches:
        """Return how many of the leading `hashes` each worker holds. Takes 50 ms at most; on any failure nothing is
        found."""
        ...

    def join(self, worker: bytes, subscribe: Callable[[], None]) -> None:
        """Add a worker that serves now. `subscribe()` asks it for its index events, which begin with a snapshot."""

    def apply(self, worker: bytes, events: pb.BlockEvents) -> None:
        """Apply the index events of a worker."""

    def drop(self, worker: bytes) -> None:
        """Remove a worker whose session has ended."""

    async def check_secret(self, fingerprint: bytes) -> None:
        """Compare this gateway's cluster secret with that of others. Raises SecretDiffers."""

    async def run(self) -> None:
        """Keep the index up to date until cancelled."""


class Change(NamedTuple):
    """Spans that a worker has sealed since the last events, and spans that it has evicted."""

    sealed: Sequence[bytes]
    evicted: Sequence[bytes]


class Feed:
    """Apply the numbered index events of one worker, and keep the spans that it holds after them."""

    def __init__(self, subscribe: Callable[[], None]):
        self.spans: set[bytes] = set()
        self._subscribe = subscribe
        self._next_seq: int | None = None  # None: a snapshot is awaited

    def join(self, subscribe: Callable[[], None]) -> None:
        """Begin another session of the worker; the spans that it held at the end of the last one are kept."""
        self._subscribe, self._next_seq = subscribe, None

    def subscribe(self) -> None:
        """Ask for a snapshot."""
        self._next_seq = None
        self._subscribe()

    def apply(self, events: pb.BlockEvents) -> Change:
        """Apply events and return what changed. After a gap in their numbers nothing is applied, and a snapshot is
        asked for."""
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
