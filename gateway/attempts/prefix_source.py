"""Ask another worker for a prefix that it holds, before it would be computed again.

Offer{spans, taker} ─► holder ─ Offered ─► Prefill.sources
                              └ NotHere, refused, lost, or no answer within OFFER_WAIT_S: compute it
"""

import asyncio
from collections.abc import Callable, Sequence

from baton.service.codec import budget_ms
from baton.v1 import worker_pb2 as pb
from gateway.link.worker_leg import Key
from gateway.link.worker_link import WorkerLink
from gateway.request.request_spec import make_taker

OFFER_WAIT_S = 0.02  # the holder answers from its ledger, and the prompt waits for it


class PrefixSource:
    """Send at most one Offer, and call back once with what it brings. It is the EventSink of its leg."""

    __slots__ = ("_on_settled", "_on_offer", "_leg", "_timer", "_is_pending")

    def __init__(self, on_settled: Callable[[list[pb.KVSource], str | None], None], on_offer: Callable[[], None]):
        """`on_settled(sources, holder's address)` is called once, with ([], None) where no prefix comes in time; never
        after `close()`. `on_offer()` is called before that where one comes in time."""
        self._on_settled, self._on_offer = on_settled, on_offer
        self._leg = self._timer = None
        self._is_pending = True

    def ask(
        self, holder: WorkerLink | None, taker: WorkerLink, hashes: Sequence[bytes], key: Key, deadline: float
    ) -> None:
        """Ask `holder` to offer the prompt's leading spans `hashes` to `taker` until `deadline` (time.monotonic()).

        Without a holder it settles at once. `key` is of the Offer alone: the holder may know the request's own key."""
        if holder is None:
            self._settle([], None)
            return
        self._leg = holder.open(key, self)
        self._timer = asyncio.get_running_loop().call_later(OFFER_WAIT_S, self._settle, [], None)
        chain = pb.SpanChain(hashes=hashes)
        self._leg.send(offer=pb.Offer(spans=chain, taker=make_taker(taker), budget_ms=budget_ms(deadline)))

    def post(self, leg, event) -> None:
        """Take the holder's answer."""
        if isinstance(event, pb.Offered):
            self._settle([pb.KVSource(handle=event.handle, ticket=event.ticket)], leg.link.address)
        else:
            self._settle([], None)

    def add(self, leg, *row) -> None:
        """Take tokens, which were not asked for, as a refusal."""
        self._settle([], None)

    def flush(self) -> bool:
        """Return False: nothing is ever held back."""
        return False

    def close(self) -> None:
        """Give the lease back and never call back again. Idempotent."""
        self._is_pending = False
        if self._leg is not None:
            self._timer.cancel()
            self._leg.close()

    def _settle(self, sources: list[pb.KVSource], holder: str | None) -> None:
        if not self._is_pending:
            return
        if sources:
            self._is_pending = False
            self._timer.cancel()
            self._on_offer()
        else:
            self.close()  # gives back what is offered too late
        self._on_settled(sources, holder)
