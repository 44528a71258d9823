"""Lease KV that lies in pools of several ranks, on other hosts or on GPUs of their own. Each lease of the worker is
also a lease of these ranks, with the same id and the same tickets, and its handle names their endpoints. A taker pulls
from all of them at the same time. A lease is over when it has ended on all ranks; only then are its blocks given back,
unless the engine has ended the key itself.

worker   {"open": ...}                                               ─► rank     {"endpoints": [...]} or {"closed": why}
worker   {"offer" | "admit" | "withdraw" | "advance" | "finish" | "cancel" | "renew": lease, ...}   ─► rank
rank     {"over": lease, "ending": released | cancelled | expired}   ─► worker
"""

import asyncio
import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from baton.worker.ranks.notes import DeviceSettings, OpenOrder
from baton.worker.ranks.rank_pools import KVRank
from kvtransfer.errors import LeaseExpired
from kvtransfer.layout import Endpoint, Part, PromptKV, Taker
from kvtransfer.transfer.leases import LeaseEnding
from kvtransfer.transfer.source import Offer, Source, SourceIdentity
from kvtransfer.transfer.ticket import parse_ticket
from kvtransfer.wire import ID_BYTES, decode_handle, encode_handle, taker_to_proto

OPEN_S = 10.0  # for the ranks to open their ports


@dataclass(slots=True)
class _RankedLease:
    """One lease: the ranks where it has not ended, whether it has ended here, and how it first ended otherwise than
    released."""

    lease_id: bytes
    ranks: set[int]
    is_here: bool = True
    ending: LeaseEnding = LeaseEnding.RELEASED  # unless it ends otherwise on some rank


class RankedSource:
    """Lease by this rank's Source and those of the other ranks, as Handoff needs it. Used in the event loop only. `own`
    is set when the Source is made."""

    own: Source

    def __init__(self, ranks: Sequence[KVRank], on_lease_end: Callable[[Hashable, LeaseEnding], None]):
        """Lease KV of `ranks`, in the order of their parts. `on_lease_end(key, ending)` is called exactly once per
        lease, when it has ended on all ranks."""
        self._ranks, self._on_lease_end = ranks, on_lease_end
        self._givers = [index for index, rank in enumerate(ranks) if rank.box is not None]
        self.mint_key = secrets.token_bytes(32)
        self._leases: dict[Hashable, _RankedLease] = {}
        self._endpoints: list[asyncio.Future[tuple[Endpoint, ...]]] = []

    async def start(self, identity: SourceIdentity, ttl_s: float, is_strict: bool, settings: DeviceSettings) -> None:
        """Let the ranks listen for takers. `settings`: for ranks on GPUs of this host, which have none of their own.
        Raises OSError if a rank does not listen."""
        order: OpenOrder = {
            "instance": identity.instance.hex(), "epoch": identity.epoch, "model": identity.model_identity.hex(),
            "numerics": identity.numerics_class, "mint": self.mint_key.hex(), "ttl_s": ttl_s, "is_strict": is_strict,
            "settings": settings,
        }  # fmt: skip
        for rank in self._ranks:
            self._endpoints.append(asyncio.get_running_loop().create_future())
            rank.stream.send_note({"open": order})
        try:
            async with asyncio.timeout(OPEN_S):
                await asyncio.gather(*self._endpoints)
        except TimeoutError:
            raise OSError(f"a rank has opened no port for its KV within {OPEN_S:.0f} s") from None

    def offer(self, key: Hashable, prompt: PromptKV, taker: Taker, *, num_ready_tokens: int = 0) -> Offer:
        """Offer a prompt as Source.offer does. It has no states, since layers with a state are not divided."""
        lease_id = secrets.token_bytes(ID_BYTES)
        offer = self.own.offer(key, prompt, taker, num_ready_tokens=num_ready_tokens, lease_id=lease_id)
        self._leases[key] = _RankedLease(lease_id, set(self._givers))
        self._send_note(
            lease_id,
            "offer",
            blocks=[list(block) for block in prompt.blocks],
            num_tokens=prompt.num_tokens,
            span_hashes=[name.hex() for name in prompt.span_hashes],
            chain_parent=prompt.chain_parent.hex(),
            taker=taker_to_proto(taker).SerializeToString().hex(),
            num_ready_tokens=num_ready_tokens,
            ticket=offer.ticket.hex(),
        )
        return self._joined(offer)

    def offer_again(self, lease_id: bytes, taker: Taker) -> Offer:
        """Offer a lease again as Source.offer_again does. Raises LeaseExpired also if the lease has ended on a rank."""
        lease = self._leases.get(self._key_of(lease_id))
        if lease is None or len(lease.ranks) < len(self._givers):
            raise LeaseExpired("no such lease, or it has ended on a rank")
        offer = self.own.offer_again(lease_id, taker)
        self._send_note(lease_id, "admit", ticket=offer.ticket.hex())
        return self._joined(offer)

    def withdraw(self, ticket: bytes) -> None:
        self.own.withdraw(ticket)
        self._send_note(parse_ticket(ticket).lease_id, "withdraw", ticket=ticket.hex())

    def advance(self, key: Hashable, upto_token: int, upto_layer: int | None = None) -> None:
        self.own.advance(key, upto_token, upto_layer)
        self._send_note_of(key, "advance", upto_token=upto_token, upto_layer=upto_layer)

    def finish(self, key: Hashable) -> None:
        self._send_note_of(key, "finish")
        self.own.finish(key)

    def renew(self, lease_id: bytes) -> bool:
        self._send_note(lease_id, "renew")
        return self.own.renew(lease_id)

    def cancel(self, key: Hashable) -> None:
        self.own.cancel(key)
        if (lease := self._leases.get(key)) is not None:
            self._give_up(lease, LeaseEnding.CANCELLED)

    def own_lease_ended(self, key: Hashable, ending: LeaseEnding) -> None:
        """Note that the lease of the worker's own Source has ended."""
        lease = self._leases[key]
        lease.is_here = False
        self._give_up(lease, ending)
        self._end_if_over(key)

    def handle_note(self, index: int, note: dict) -> None:
        """Handle a note of a rank."""
        match note:
            case {"endpoints": endpoints}:
                self._endpoints[index].set_result(tuple(Endpoint(*each) for each in endpoints))
            case {"closed": why}:
                self._endpoints[index].set_exception(OSError(why))
            case {"over": lease_id, "ending": ending}:
                self._ended_on_rank(bytes.fromhex(lease_id), index, LeaseEnding(ending))

    def _ended_on_rank(self, lease_id: bytes, index: int, ending: LeaseEnding) -> None:
        key = self._key_of(lease_id)
        if (lease := self._leases.get(key)) is None:
            return
        lease.ranks.discard(index)
        self._give_up(lease, ending)
        if ending is not LeaseEnding.RELEASED:
            self.own.cancel(key)
        self._end_if_over(key)

    def _key_of(self, lease_id: bytes) -> Hashable | None:
        return next((key for key, lease in self._leases.items() if lease.lease_id == lease_id), None)

    def _give_up(self, lease: _RankedLease, ending: LeaseEnding) -> None:
        if ending is not LeaseEnding.RELEASED and lease.ending is LeaseEnding.RELEASED:
            lease.ending = ending
            self._send_note(lease.lease_id, "cancel")

    def _end_if_over(self, key: Hashable) -> None:
        lease = self._leases.get(key)
        if lease is not None and not lease.is_here and not lease.ranks:
            del self._leases[key]
            self._on_lease_end(key, lease.ending)

    def _send_note_of(self, key: Hashable, what: str, **fields) -> None:
        if (lease := self._leases.get(key)) is not None:
            self._send_note(lease.lease_id, what, **fields)

    def _send_note(self, lease_id: bytes, what: str, **fields) -> None:
        for index in self._givers:
            self._ranks[index].stream.send_note({what: lease_id.hex(), **fields})

    def _joined(self, offer: Offer) -> Offer:
        """Return the offer with the parts of all ranks in its handle."""
        handle = decode_handle(offer.handle)
        theirs = (
            Part(*rank.box, endpoints.result())
            for rank, endpoints in zip(self._ranks, self._endpoints, strict=True)
            if rank.box is not None
        )
        return offer._replace(handle=encode_handle(replace(handle, parts=(*handle.parts, *theirs))))
