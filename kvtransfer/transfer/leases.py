"""Keep blocks for the holders of tickets. Every lease ends, and its end is reported exactly once.

    grant ──► alive ── advance(token, layer) ... finish ──┐
                │  renewed by the gateway until the first Want, then by the takers' dialogues
                ├── finished, taken by one, awaited by none ──► released ─┐
                ├── cancel ───────────────────────────────────► cancelled ├──► on_lease_end(key, ending), once
                └── no renewal for ttl ───────────────────────► expired ──┘    (released, if anyone has taken it)

A lease has a fetch for each ticket. The lease awaits a fetch that has not begun or whose dialogue is open. It does not
await a fetch whose taker is lost, because another ticket may replace it.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Hashable
from enum import StrEnum
from typing import NamedTuple

from kvtransfer.errors import KVError, LeaseExpired, ProtocolError, TicketRefused, TransferCancelled
from kvtransfer.layout import PromptKV
from kvtransfer.naming import SPAN_TOKENS

MAX_FETCHES = 64  # tickets of one lease

log = logging.getLogger(__name__)


class LeaseEnding(StrEnum):
    """How a lease ended. Ranks of a worker write it to each other."""

    RELEASED = "released"  # taken to the end
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # not renewed in time


class Watermark(NamedTuple):
    """Say how far KV is written: all layers below `full_token`, and the first `upto_layer` layers below
    `upto_token`."""

    full_token: int
    upto_token: int
    upto_layer: int


class Fetch:
    """Track one ticket's taker. It opens `num_shares` dialogues, one per rank and box; the first Want says how many."""

    def __init__(self):
        self.num_shares = 0
        self.num_open = 0
        self.confirmed: set[int] = set()
        self.is_withdrawn = False

    @property
    def is_done(self) -> bool:
        return 0 < self.num_shares == len(self.confirmed)

    @property
    def is_awaited(self) -> bool:
        return not self.is_done and (self.num_open > 0 or self.num_shares == 0)


class Lease:
    """Keep the blocks of one prompt for its takers. `changed` is set when the watermark moves or the lease ends."""

    def __init__(
        self, lease_id: bytes, key: Hashable, prompt: PromptKV, num_layers: int, ttl_s: float, deadline: float
    ):
        self.lease_id = lease_id
        self.key = key
        self.prompt = prompt
        self.num_layers = num_layers
        self.ttl_s = ttl_s
        self.deadline = deadline
        self.watermark = Watermark(0, 0, 0)
        self.is_finished = False
        self.fetches: dict[bytes, Fetch] = {}  # by fetch id
        self.ending: LeaseEnding | None = None
        self.changed = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Return whether every layer of every token is written."""
        return self.watermark.full_token == self.prompt.num_tokens

    @property
    def is_taken(self) -> bool:
        return any(fetch.is_done for fetch in self.fetches.values())

    def add_fetch(self, fetch_id: bytes) -> None:
        """Add the fetch of a new ticket. Raises ValueError beyond MAX_FETCHES."""
        if len(self.fetches) >= MAX_FETCHES:
            raise ValueError(f"a lease has at most {MAX_FETCHES} tickets")
        self.fetches[fetch_id] = Fetch()

    def begin(self, fetch_id: bytes, share: int, num_shares: int) -> Fetch:
        """Note that a dialogue of this fetch begins. Raises TicketRefused when the fetch is over, ProtocolError when
        the shares of its dialogues contradict each other."""
        fetch = self.fetches.get(fetch_id)
        if fetch is None or fetch.is_done:
            raise TicketRefused("this ticket's fetch is over, or was withdrawn")
        if not share < num_shares or fetch.num_shares not in (0, num_shares):
            raise ProtocolError(f"share {share} of {num_shares}, the fetch has {fetch.num_shares}")
        fetch.num_shares = num_shares
        fetch.num_open += 1
        return fetch

    def advance(self, upto_token: int, upto_layer: int | None = None) -> None:
        """Note that KV is written below `upto_token` in all layers below `upto_layer` (None: all layers). Tokens of an
        incomplete span count only at the end of the prompt. Raises ValueError for a watermark that goes back or beyond
        the prompt."""
        layer = self.num_layers if upto_layer is None else upto_layer
        num_tokens = self.prompt.num_tokens
        if not 0 <= upto_token <= num_tokens or not 0 <= layer <= self.num_layers:
            size = f"{num_tokens} tokens, {self.num_layers} layers"
            raise ValueError(f"watermark ({upto_token}, {layer}) beyond {size}")
        token = upto_token if upto_token == num_tokens else upto_token // SPAN_TOKENS * SPAN_TOKENS
        mark = self.watermark
        if layer == self.num_layers:
            if token < mark.upto_token:
                raise ValueError(f"watermark ({upto_token}, {layer}) goes back behind {mark}")
            moved = Watermark(token, token, layer)
        else:
            grows = token > mark.full_token and mark.full_token == mark.upto_token
            deepens = token == mark.upto_token > mark.full_token and layer >= mark.upto_layer
            if token == mark.full_token:
                return  # less than a whole span was added
            if not grows and not deepens:
                raise ValueError(f"watermark ({upto_token}, {layer}) does not continue {mark}")
            moved = Watermark(mark.full_token, token, layer)
        self.watermark = moved
        self.changed.set()

    def check_alive(self) -> None:
        """Raise TransferCancelled or LeaseExpired if the lease has ended."""
        if self.ending is LeaseEnding.CANCELLED:
            raise TransferCancelled("the source's request was cancelled")
        if self.ending:
            raise LeaseExpired(f"the lease has ended: {self.ending}")


class LeaseTable:
    """Hold all leases of a source. `clock` returns monotonic seconds. All methods are called in the event loop's
    thread."""

    def __init__(self, clock: Callable[[], float], on_lease_end: Callable[[Hashable, LeaseEnding], None]):
        self._clock = clock
        self._on_lease_end = on_lease_end
        self._by_id: dict[bytes, Lease] = {}
        self._by_key: dict[Hashable, Lease] = {}
        self._news = asyncio.Event()  # set when the next ticket of another rank is known

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_fetches(self) -> int:
        return sum(len(lease.fetches) for lease in self._by_id.values())

    def grant(
        self, key: Hashable, prompt: PromptKV, *, num_layers: int, ttl_s: float, lease_id: bytes | None = None
    ) -> Lease:
        """Grant a lease for `key`. Ranks of one source pass a common `lease_id`. Raises ValueError while `key` or the
        id has a lease."""
        lease_id = lease_id or secrets.token_bytes(16)
        if key in self._by_key or lease_id in self._by_id:
            raise ValueError(f"{key} has a lease already")
        deadline = self._clock() + ttl_s
        lease = Lease(lease_id, key, prompt, num_layers, ttl_s, deadline)
        self._by_id[lease_id] = self._by_key[key] = lease
        return lease

    def admit(self, key: Hashable, fetch_id: bytes) -> None:
        """Add a ticket that another rank of this source has minted, and renew the lease. Do nothing for a key without a
        lease."""
        if (lease := self._by_key.get(key)) and self.renew(lease.lease_id):
            lease.add_fetch(fetch_id)
            self._news.set()
            self._news = asyncio.Event()

    async def arrival(self, lease_id: bytes, fetch_id: bytes, within_s: float) -> None:
        """Wait until a ticket is known here, at most `within_s`: a taker may arrive before the rank that minted its
        ticket has told this one."""
        try:
            async with asyncio.timeout(within_s):
                while (lease := self._by_id.get(lease_id)) is None or fetch_id not in lease.fetches:
                    await self._news.wait()
        except TimeoutError:
            pass  # `find` or `begin` raises the error

    def find(self, lease_id: bytes) -> Lease:
        """Return the lease, and end it if its deadline has passed. Raises LeaseExpired for a lease that has ended or
        never existed."""
        lease = self._by_id.get(lease_id)
        if lease is not None and lease.deadline <= self._clock():
            self._expire(lease)
            lease = None
        if lease is None:
            raise LeaseExpired("no such lease, or it has ended")
        return lease

    def of(self, key: Hashable) -> Lease | None:
        return self._by_key.get(key)

    def renew(self, lease_id: bytes) -> bool:
        """Extend the lease to its ttl from now; return False if it has ended."""
        try:
            lease = self.find(lease_id)
        except KVError:
            return False
        lease.deadline = self._clock() + lease.ttl_s
        return True

    def finish(self, key: Hashable) -> None:
        """Mark the prefill complete, and release the lease if it is taken and awaits no fetch. Do nothing for a key
        without a lease."""
        if lease := self._by_key.get(key):
            if not lease.is_complete:
                lease.advance(lease.prompt.num_tokens)
            lease.is_finished = True
            self._release_if_done(lease)

    def confirm(self, lease: Lease, fetch: Fetch, share: int) -> None:
        """Note that a taker has verified a whole share."""
        fetch.confirmed.add(share)
        self._release_if_done(lease)

    def leave(self, lease: Lease, fetch: Fetch) -> None:
        """Note that a dialogue has ended."""
        fetch.num_open -= 1
        self._release_if_done(lease)

    def withdraw(self, lease_id: bytes, fetch_id: bytes) -> None:
        """Withdraw a ticket: it opens no more dialogues, and the lease no longer awaits its taker. Idempotent."""
        lease = self._by_id.get(lease_id)
        if lease is not None and (fetch := lease.fetches.pop(fetch_id, None)):
            fetch.is_withdrawn = True
            lease.changed.set()
            self._release_if_done(lease)

    def cancel(self, key: Hashable) -> None:
        """Cancel the lease of `key`, if any. Idempotent."""
        if lease := self._by_key.get(key):
            self._end(lease, LeaseEnding.CANCELLED)

    def expire(self) -> None:
        """End the leases past their deadline."""
        now = self._clock()
        for lease in [lease for lease in self._by_id.values() if lease.deadline <= now]:
            self._expire(lease)

    def close(self) -> None:
        """Cancel all leases."""
        for lease in list(self._by_id.values()):
            self._end(lease, LeaseEnding.CANCELLED)

    def _expire(self, lease: Lease) -> None:
        self._end(lease, LeaseEnding.RELEASED if lease.is_finished and lease.is_taken else LeaseEnding.EXPIRED)

    def _release_if_done(self, lease: Lease) -> None:
        awaited = any(fetch.is_awaited for fetch in lease.fetches.values())
        if lease.is_finished and lease.is_taken and not awaited and not lease.ending:
            self._end(lease, LeaseEnding.RELEASED)

    def _end(self, lease: Lease, ending: LeaseEnding) -> None:
        if lease.ending:
            return  # on_lease_end may have called this again
        lease.ending = ending
        del self._by_id[lease.lease_id], self._by_key[lease.key]
        lease.changed.set()
        try:
            self._on_lease_end(lease.key, ending)
        except Exception:
            log.exception("on_lease_end(%s) failed", lease.key)  # go on: the other leases still have to end
