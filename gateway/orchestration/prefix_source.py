"""A prefix that another worker holds, asked for before a prefill worker would compute it.

Offer{spans, taker} ─► holder ─ Offered ─► Prefill.sources
                              └ NotHere, refused, lost, or no answer within OFFER_WAIT_S: it is computed
"""

import asyncio
from collections.abc import Callable, Sequence

from baton.service.codec import budget_ms
from baton.v1 import worker_pb2 as pb
from gateway.link.worker_leg import Key
from gateway.link.worker_link import WorkerLink
from gateway.request.request_spec import make_taker

OFFER_WAIT_S = 0.02  # it is answered from the holder's ledger, and the prompt waits for it


class PrefixSource:
    """At most one Offer. `on_settled(sources, address of who gives them)` is called once, at once where there is nobody
    to be asked, unless `close()` comes first, which gives the lease back and is idempotent."""

    def __init__(self, on_settled: Callable[[list[pb.KVSource], str | None], None]):
        self._on_settled = on_settled
        self._leg = self._timer = None
        self._is_pending = True

    def ask(
        self, holder: WorkerLink | None, reader: WorkerLink, hashes: Sequence[bytes], key: Key, deadline: float
    ) -> None:
        """For the spans `hashes`, from the prompt's first on, to be pulled by `reader` until `deadline`. `key`: of the
        Offer alone, since the holder may have the request's."""
        if holder is None:
            self._settle([], None)
            return
        self._leg = holder.open(key, self)
        self._timer = asyncio.get_running_loop().call_later(OFFER_WAIT_S, self._settle, [], None)
        chain, taker = pb.SpanChain(hashes=hashes), make_taker(reader, 0)
        self._leg.send(offer=pb.Offer(spans=chain, taker=taker, budget_ms=budget_ms(deadline)))

    def post(self, leg, event) -> None:
        """The holder's answer: this is the mailbox of its leg."""
        if isinstance(event, pb.Offered):
            self._settle([pb.KVSource(handle=event.handle, ticket=event.ticket)], leg.link.address)
        else:
            self._settle([], None)

    def add(self, leg, *row) -> None:
        """Tokens, which nobody has asked for."""
        self._settle([], None)

    def hurry(self) -> bool:
        return False

    def close(self) -> None:
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
        else:
            self.close()  # what is offered too late is given back
        self._on_settled(sources, holder)
