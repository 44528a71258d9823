"""Ask another worker to offer a prefix that it holds, so that the prefix is not computed again.

Offer{spans, taker} ─► holder ─ Offered ─► Prefill.sources
                              └ NotHere, refused, lost, or no answer within OFFER_WAIT_S: compute it
"""

import asyncio
from collections.abc import Callable, Sequence

from baton.service.codec import budget_ms
from baton.v1 import worker_pb2 as pb
from gateway.link.worker_leg import Key, WorkerLeg
from gateway.link.worker_link import WorkerLink
from gateway.request.request_spec import make_taker

OFFER_WAIT_S = 0.02  # short: the holder answers from its ledger, and the prompt waits for the answer


class PrefixSource:
    """Send at most one Offer, and call back once with its result. It is the EventSink of its leg."""

    __slots__ = ("_on_settled", "_on_offer", "_leg", "_timer", "_is_pending")

    def __init__(self, on_settled: Callable[[list[pb.KVSource], str | None], None], on_offer: Callable[[], None]):
        """`on_settled(sources, holder's address)` is called once, with ([], None) if no offer comes in time, and never
        after `close()`. If an offer comes in time, `on_offer()` is called before `on_settled`."""
        self._on_settled, self._on_offer = on_settled, on_offer
        self._leg: WorkerLeg | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_pending = True

    def ask(
        self, holder: WorkerLink | None, taker: WorkerLink, hashes: Sequence[bytes], key: Key, deadline: float
    ) -> None:
        """Ask `holder` to offer the prompt's leading spans `hashes` to `taker` until `deadline` (time.monotonic()).

        Without a holder, `on_settled` is called before this returns. `key` is used by the Offer only: the holder may
        know the key of the request itself."""
        if holder is None:
            self._settle([], None)
            return
        self._leg = holder.open(key, self)
        self._timer = asyncio.get_running_loop().call_later(OFFER_WAIT_S, self._settle, [], None)
        chain = pb.SpanChain(hashes=hashes)
        self._leg.send(offer=pb.Offer(spans=chain, taker=make_taker(taker), budget_ms=budget_ms(deadline)))

    def post(self, leg, event) -> None:
        """Settle with the holder's answer: an offer, or any other event as a refusal."""
        if isinstance(event, pb.Offered):
            self._settle([pb.KVSource(handle=event.handle, ticket=event.ticket)], leg.link.address)
        else:
            self._settle([], None)

    def add(self, leg, *row) -> None:
        """Settle without an offer: tokens were not asked for."""
        self._settle([], None)

    def flush(self) -> bool:
        """Return False: no tokens ever wait here."""
        return False

    def close(self) -> None:
        """Give the lease back, and make sure that no callback is called any more. Idempotent."""
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
            self.close()  # gives back the lease of an offer that comes too late
        self._on_settled(sources, holder)
