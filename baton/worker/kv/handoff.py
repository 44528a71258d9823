"""The source's side: prompts that are prefilled here, and spans that lie here, leased to a taker.

accept ─► lease (handle, ticket) ─► advance with the watermark ─► finish ─► taken to the end │ expired │ cancelled
             └─ the same lease for another taker: a ticket of its own       └─ lease over, once for each key on it
"""

from collections.abc import Callable, Sequence

from baton import failpoints
from baton.engine.core.request import Acceptance, Key, Progress
from baton.v1 import kv_pb2
from baton.worker.legs.leg import Leg
from kvtransfer.transfer.leases import CANCELLED
from kvtransfer.transfer.source import Offer, Source
from kvtransfer.wire import Taker, taker_from_proto


class Handoff:
    """All leases that this worker gives. Belongs to the event loop. `on_over(key, ending)`: once for each key that was
    leased something, in the source's words: released | cancelled | expired."""

    def __init__(self, source: Source):
        self.on_over: Callable[[Key, str], None] = lambda key, ending: None
        self._source = source
        self._owners: dict[bytes, Key] = {}  # by lease
        self._guests: dict[Key, list[Leg]] = {}  # by owner: keys that have a ticket for the same lease

    @property
    def num_owners(self) -> int:
        """Keys that have a lease."""
        return len(self._owners)

    @property
    def num_guests(self) -> int:
        """Keys that have a ticket for another's."""
        return sum(map(len, self._guests.values()))

    def taker_of(self, message: kv_pb2.Taker) -> Taker:
        """Raises KVError for a taker that makes no sense."""
        return taker_from_proto(message)

    def lease_prompt(self, leg: Leg, acceptance: Acceptance, taker: Taker) -> dict[str, bytes]:
        """A lease on a prompt that is being prefilled: lease_id, handle and ticket. What is cached is ready now.
        Raises KVError when the taker keeps KV otherwise."""
        request = leg.request
        offer = self._source.offer(
            leg.key,
            acceptance.blocks,
            len(request.token_ids),
            request.span_hashes,
            request.chain_parent,
            taker,
            num_ready_tokens=acceptance.num_cached_tokens,
        )
        failpoints.hit("prefill.accepted")
        return self._leased(leg, offer)

    def lease_chain(
        self, leg: Leg, acceptance: Acceptance, span_hashes: Sequence[bytes], taker: Taker
    ) -> dict[str, bytes]:
        """A lease on whole spans that are here already."""
        num_tokens = acceptance.num_cached_tokens
        offer = self._source.offer(
            leg.key, acceptance.blocks, num_tokens, span_hashes, span_hashes[-1], taker, num_ready_tokens=num_tokens
        )
        self._source.finish(leg.key)
        return self._leased(leg, offer)

    def lease_again(self, leg: Leg, lease_id: bytes, taker: Taker) -> dict[str, bytes]:
        """The lease of another key, for one more taker; it ends with that key's. Raises LeaseExpired, LayoutMismatch."""
        offer = self._source.offer_again(lease_id, taker)
        self._guests.setdefault(self._owners[lease_id], []).append(leg)
        return self._ticketed(leg, offer)

    def lease_over(self, key: Key, ending: str) -> None:
        """What the source says of a key's lease."""
        self._owners = {lease_id: owner for lease_id, owner in self._owners.items() if owner != key}
        guests = self._guests.pop(key, [])
        for each in (key, *(guest.key for guest in guests)):
            self.on_over(each, ending)

    def advance(self, leg: Leg, progress: Progress) -> None:
        self._source.advance(leg.key, progress.upto_token, progress.upto_layer)

    def finish(self, leg: Leg) -> None:
        """The prefill is complete: the lease ends as soon as its taker has everything."""
        self._source.finish(leg.key)

    def renew(self, leg: Leg, lease_id: bytes) -> None:
        """The gateway's word that a taker will come. Nothing for a lease that is not this key's."""
        if lease_id == leg.lease_id:
            self._source.renew(lease_id)

    def prefix_arrived(self, leg: Leg, upto_token: int) -> None:
        """A prefix that was pulled from elsewhere is as good as computed."""
        self._source.advance(leg.key, upto_token)

    def cancel(self, leg: Leg) -> None:
        """Lease over follows at once. Idempotent."""
        for guests in self._guests.values():
            if leg in guests:
                guests.remove(leg)
                self._source.withdraw(leg.ticket)
                self.on_over(leg.key, CANCELLED)
                return
        self._source.cancel(leg.key)

    def _leased(self, leg: Leg, offer: Offer) -> dict[str, bytes]:
        self._owners[offer.lease_id] = leg.key
        return self._ticketed(leg, offer)

    @staticmethod
    def _ticketed(leg: Leg, offer: Offer) -> dict[str, bytes]:
        leg.lease_id, leg.ticket = offer.lease_id, offer.ticket
        return {"lease_id": offer.lease_id, "handle": offer.handle, "ticket": offer.ticket}
