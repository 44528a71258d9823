"""Lease prompts that are prefilled here, and spans that are cached here, to takers: the source's side.

accept ─► lease (handle, ticket) ─► advance with the watermark ─► finish ─► taken to the end │ expired │ cancelled
             └─ another ticket of the same lease for another taker          └─ lease over, once for each leg on it
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from baton import failpoints
from baton.engine.core.request import Acceptance, Key
from baton.v1 import kv_pb2
from baton.worker.legs.leg import Leg
from kvtransfer.layout import PromptKV, Taker
from kvtransfer.transfer.leases import LeaseEnding
from kvtransfer.transfer.source import Offer
from kvtransfer.wire import taker_from_proto

OnLeaseEnd = Callable[[Key, LeaseEnding], None]  # called with the key of the leg


class Leaseholders:
    """Remember which legs have a lease (owners) or a ticket for another leg's lease (guests), and tell each of them
    once that the lease is over."""

    def __init__(self) -> None:
        self._owners: dict[bytes, tuple[Key, OnLeaseEnd]] = {}  # by lease
        self._guests: dict[Key, list[tuple[Leg, OnLeaseEnd]]] = {}  # by owner

    @property
    def num_owners(self) -> int:
        return len(self._owners)

    @property
    def num_guests(self) -> int:
        return sum(map(len, self._guests.values()))

    def add_owner(self, lease_id: bytes, key: Key, on_lease_end: OnLeaseEnd) -> None:
        self._owners[lease_id] = key, on_lease_end

    def add_guest(self, lease_id: bytes, guest: Leg, on_lease_end: OnLeaseEnd) -> None:
        """Add a leg that has a ticket for this lease. Raises KeyError for a lease without an owner."""
        owner, _ = self._owners[lease_id]
        self._guests.setdefault(owner, []).append((guest, on_lease_end))

    def remove_guest(self, leg: Leg) -> OnLeaseEnd | None:
        """Remove a guest and return its callback; None for a leg that is not a guest."""
        for guests in self._guests.values():
            for place, (guest, on_lease_end) in enumerate(guests):
                if guest is leg:
                    del guests[place]
                    return on_lease_end
        return None

    def lease_ended(self, key: Key, ending: LeaseEnding) -> None:
        """Tell the owner and the guests of a lease that the source has ended."""
        callbacks = [on_lease_end for owner, on_lease_end in self._owners.values() if owner == key]
        self._owners = {lease_id: each for lease_id, each in self._owners.items() if each[0] != key}
        guests = self._guests.pop(key, [])
        for on_lease_end in callbacks:
            on_lease_end(key, ending)
        for guest, on_lease_end in guests:
            on_lease_end(guest.key, ending)


class LeasingSource(Protocol):
    """The source that Handoff uses: kvtransfer's Source, or RankedSource for a worker whose ranks have pools of their
    own. Its methods do what those of kvtransfer's Source say."""

    def offer(self, key: Hashable, prompt: PromptKV, taker: Taker, *, num_ready_tokens: int = 0) -> Offer: ...
    def offer_again(self, lease_id: bytes, taker: Taker) -> Offer: ...
    def withdraw(self, ticket: bytes) -> None: ...
    def advance(self, key: Hashable, upto_token: int, upto_layer: int | None = None) -> None: ...
    def finish(self, key: Hashable) -> None: ...
    def renew(self, lease_id: bytes) -> bool: ...
    def cancel(self, key: Hashable) -> None: ...


class Handoff:
    """Give leases to takers. Called in the event loop. `on_lease_end` is called once for each leg on a lease, with the
    way it ended: released, cancelled or expired."""

    def __init__(self, source: LeasingSource, holders: Leaseholders):
        """Lease KV of `source`, which calls `holders.lease_ended` at each lease's end."""
        self._source = source
        self._holders = holders

    def taker_of(self, message: kv_pb2.Taker) -> Taker:
        """Return the taker. Raises KVError for one that makes no sense."""
        return taker_from_proto(message)

    def lease_prompt(
        self, leg: Leg, acceptance: Acceptance, taker: Taker, on_lease_end: OnLeaseEnd
    ) -> dict[str, bytes]:
        """Lease a prompt that is being prefilled; return lease_id, handle and ticket. Its cached tokens can be pulled
        immediately. Raises KVError for a taker that this KV cannot feed."""
        request, num_tokens = leg.request, len(leg.request.token_ids)
        prompt = PromptKV(num_tokens, acceptance.blocks, request.span_hashes, request.chain_parent, acceptance.states)
        offer = self._source.offer(leg.key, prompt, taker, num_ready_tokens=acceptance.num_cached_tokens)
        failpoints.hit("prefill.accepted")
        return self._leased(leg, offer, on_lease_end)

    def lease_chain(
        self, leg: Leg, acceptance: Acceptance, span_hashes: Sequence[bytes], taker: Taker, on_lease_end: OnLeaseEnd
    ) -> dict[str, bytes]:
        """Lease whole spans that are cached here; return lease_id, handle and ticket."""
        num_tokens = acceptance.num_cached_tokens
        prompt = PromptKV(num_tokens, acceptance.blocks, tuple(span_hashes), span_hashes[-1], acceptance.states)
        offer = self._source.offer(leg.key, prompt, taker, num_ready_tokens=num_tokens)
        self._source.finish(leg.key)
        return self._leased(leg, offer, on_lease_end)

    def lease_again(self, leg: Leg, lease_id: bytes, taker: Taker, on_lease_end: OnLeaseEnd) -> dict[str, bytes]:
        """Lease another leg's KV to one more taker; this lease ends with that leg's. Raises LeaseExpired,
        LayoutMismatch."""
        offer = self._source.offer_again(lease_id, taker)
        self._holders.add_guest(lease_id, leg, on_lease_end)
        return self._ticketed(leg, offer)

    def advance(self, leg: Leg, upto_token: int, upto_layer: int | None = None) -> None:
        """Let takers pull KV below `upto_token` in the layers below `upto_layer` (None: all layers)."""
        self._source.advance(leg.key, upto_token, upto_layer)

    def finish(self, leg: Leg) -> None:
        """Note that the prefill is complete: the lease ends as soon as its taker has everything."""
        self._source.finish(leg.key)

    def renew(self, leg: Leg, lease_id: bytes) -> None:
        """Renew a lease whose taker has not come yet; do nothing for a lease that is not this leg's."""
        if lease_id == leg.lease_id:
            self._source.renew(lease_id)

    def cancel(self, leg: Leg) -> None:
        """End a leg's part in a lease; `on_lease_end` follows. Idempotent."""
        if (on_lease_end := self._holders.remove_guest(leg)) is not None:
            self._source.withdraw(leg.ticket)
            on_lease_end(leg.key, LeaseEnding.CANCELLED)
        else:
            self._source.cancel(leg.key)

    def _leased(self, leg: Leg, offer: Offer, on_lease_end: OnLeaseEnd) -> dict[str, bytes]:
        self._holders.add_owner(offer.lease_id, leg.key, on_lease_end)
        return self._ticketed(leg, offer)

    @staticmethod
    def _ticketed(leg: Leg, offer: Offer) -> dict[str, bytes]:
        leg.lease_id, leg.ticket = offer.lease_id, offer.ticket
        return {"lease_id": offer.lease_id, "handle": offer.handle, "ticket": offer.ticket}
