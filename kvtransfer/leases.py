"""Leases: blocks kept for one taker, with an end that always comes and is told exactly once.

    grant ──► alive ── advance(token, layer) ... finish ──┐
                │  renew: until the first Want the gateway, then the taker's dialogue
                ├── confirmed to the end and finished ──► released ─┐
                ├── cancel ─────────────────────────────► cancelled ├──► on_release(key), once
                └── no renewal for ttl ─────────────────► expired ──┘
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from kvtransfer.errors import KVError, LeaseExpired, TransferCancelled
from kvtransfer.layout import BlockRef
from kvtransfer.naming import SPAN_TOKENS


log = logging.getLogger(__name__)


class Watermark(NamedTuple):
    """All layers are ready below `full_token`; below `upto_token` the first `upto_layer` of them."""

    full_token: int
    upto_token: int
    upto_layer: int


class Lease:
    """Blocks of `num_tokens` tokens, kept for `taker`. `changed` is set when the watermark moves or the lease ends."""

    def __init__(
        self, key: Hashable, blocks: Sequence[BlockRef], num_tokens: int, num_layers: int, span_hashes: Sequence[bytes],
        chain_parent: bytes, taker: tuple[bytes, int], ttl_s: float, deadline: float,
    ):  # fmt: skip
        self.lease_id = secrets.token_bytes(16)
        self.key = key
        self.blocks = tuple(blocks)
        self.num_tokens = num_tokens
        self.num_layers = num_layers
        self.span_hashes = tuple(span_hashes)
        self.chain_parent = chain_parent
        self.taker = taker  # instance, epoch
        self.ttl_s = ttl_s
        self.deadline = deadline
        self.watermark = Watermark(0, 0, 0)
        self.is_finished = False
        self.is_confirmed = False
        self.ending = ""  # released | cancelled | expired
        self.changed = asyncio.Event()

    def advance(self, upto_token: int, upto_layer: int | None = None) -> None:
        """KV is written below `upto_token` in all layers below `upto_layer` (None: all). What does not fill a span
        waits for the rest of it, except at the end. Raises ValueError for a watermark that goes back or out."""
        layer = self.num_layers if upto_layer is None else upto_layer
        if not 0 <= upto_token <= self.num_tokens or not 0 <= layer <= self.num_layers:
            size = f"{self.num_tokens} tokens, {self.num_layers} layers"
            raise ValueError(f"watermark ({upto_token}, {layer}) beyond {size}")
        token = upto_token if upto_token == self.num_tokens else upto_token // SPAN_TOKENS * SPAN_TOKENS
        mark = self.watermark
        if layer == self.num_layers:
            if token < mark.upto_token:
                raise ValueError(f"watermark ({upto_token}, {layer}) goes back behind {mark}")
            moved = Watermark(token, token, layer)
        else:
            grows = token > mark.full_token and mark.full_token == mark.upto_token
            deepens = token == mark.upto_token > mark.full_token and layer >= mark.upto_layer
            if token == mark.full_token:
                return  # not a whole span more than before
            if not grows and not deepens:
                raise ValueError(f"watermark ({upto_token}, {layer}) does not continue {mark}")
            moved = Watermark(mark.full_token, token, layer)
        self.watermark = moved
        self.changed.set()

    def check_alive(self) -> None:
        """Raises TransferCancelled or LeaseExpired."""
        if self.ending == "cancelled":
            raise TransferCancelled("the source's request was cancelled")
        if self.ending:
            raise LeaseExpired(f"the lease has ended: {self.ending}")


class LeaseTable:
    """All leases of a source. `clock`: monotonic seconds. One thread, the event loop's, calls everything here."""

    def __init__(self, clock: Callable[[], float], on_release: Callable[[Hashable], None]):
        self._clock = clock
        self._on_release = on_release
        self._by_id: dict[bytes, Lease] = {}
        self._by_key: dict[Hashable, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def grant(
        self, key: Hashable, *, blocks: Sequence[BlockRef], num_tokens: int, num_layers: int,
        span_hashes: Sequence[bytes], chain_parent: bytes, taker: tuple[bytes, int], ttl_s: float,
    ) -> Lease:  # fmt: skip
        """Raises ValueError while `key` has a lease."""
        if key in self._by_key:
            raise ValueError(f"{key} has a lease already")
        deadline = self._clock() + ttl_s
        lease = Lease(key, blocks, num_tokens, num_layers, span_hashes, chain_parent, taker, ttl_s, deadline)
        self._by_id[lease.lease_id] = self._by_key[key] = lease
        return lease

    def find(self, lease_id: bytes) -> Lease:
        """Raises LeaseExpired for a lease that has ended or never was; one past its deadline ends here."""
        lease = self._by_id.get(lease_id)
        if lease is not None and lease.deadline <= self._clock():
            self._end(lease, "expired")
            lease = None
        if lease is None:
            raise LeaseExpired("no such lease, or it has ended")
        return lease

    def of(self, key: Hashable) -> Lease | None:
        return self._by_key.get(key)

    def renew(self, lease_id: bytes) -> bool:
        """The lease lives its ttl from now; False where it has ended."""
        try:
            lease = self.find(lease_id)
        except KVError:
            return False
        lease.deadline = self._clock() + lease.ttl_s
        return True

    def finish(self, key: Hashable) -> None:
        """The prefill is complete. With everything confirmed the lease ends; a key without a lease is no fault."""
        if lease := self._by_key.get(key):
            if lease.watermark.full_token < lease.num_tokens:
                lease.advance(lease.num_tokens)
            lease.is_finished = True
            self._release_if_done(lease)

    def confirm(self, lease: Lease) -> None:
        """The taker has verified everything."""
        lease.is_confirmed = True
        self._release_if_done(lease)

    def release(self, lease_id: bytes) -> None:
        """Idempotent, like `cancel`."""
        if lease := self._by_id.get(lease_id):
            self._end(lease, "released")

    def cancel(self, key: Hashable) -> None:
        if lease := self._by_key.get(key):
            self._end(lease, "cancelled")

    def expire(self) -> int:
        """Ends the leases past their deadline; how many."""
        now = self._clock()
        late = [lease for lease in self._by_id.values() if lease.deadline <= now]
        for lease in late:
            self._end(lease, "expired")
        return len(late)

    def close(self) -> None:
        """Cancels all."""
        for lease in list(self._by_id.values()):
            self._end(lease, "cancelled")

    def _release_if_done(self, lease: Lease) -> None:
        if lease.is_finished and lease.is_confirmed and not lease.ending:
            self._end(lease, "released")

    def _end(self, lease: Lease, ending: str) -> None:
        if lease.ending:
            return  # on_release may have come back here
        lease.ending = ending
        del self._by_id[lease.lease_id], self._by_key[lease.key]
        lease.changed.set()
        try:
            self._on_release(lease.key)
        except Exception:
            log.exception("on_release(%s) failed", lease.key)  # the other leases still have to end
