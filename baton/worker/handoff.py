"""The source's side: prompts that are prefilled here, and spans that lie here, leased to a taker.

    accept ─► lease (handle, ticket) ─► advance with the watermark ─► finish ─► taken to the end │ expired │ cancelled
                                                                                 └─ lease over, exactly once
"""

from collections.abc import Sequence

from baton.engine.request import Acceptance, Progress
from baton.v1 import kv_pb2
from baton.worker.leg import Leg
from kvtransfer.source import Offer, Source
from kvtransfer.wire import Taker, taker_from_proto


class Handoff:
    """All leases that this worker gives. Belongs to the event loop."""

    def __init__(self, source: Source):
        self._source = source

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

    def advance(self, leg: Leg, progress: Progress) -> None:
        self._source.advance(leg.key, progress.upto_token, progress.upto_layer)

    def finish(self, leg: Leg) -> None:
        """The prefill is complete: the lease ends as soon as its taker has everything."""
        self._source.finish(leg.key)

    def renew(self, leg: Leg, lease_id: bytes) -> None:
        """The gateway's word that a taker will come. Nothing for a lease that is not this key's."""
        if lease_id == leg.lease_id:
            self._source.renew(lease_id)

    def cancel(self, leg: Leg) -> None:
        """Lease over follows at once. Idempotent."""
        self._source.cancel(leg.key)

    def _leased(self, leg: Leg, offer: Offer) -> dict[str, bytes]:
        leg.lease_id = offer.lease_id
        return {"lease_id": offer.lease_id, "handle": offer.handle, "ticket": offer.ticket}
