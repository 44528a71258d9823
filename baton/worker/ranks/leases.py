"""KV of layers on other hosts, given by the ranks that have them: a lease of the worker is one of each of these ranks too, by the
same name and for the same tickets, and its handle names their endpoints. A taker pulls from all of them at the same time.

worker   {"open": ...}                                                   ─► rank     {"endpoints": [...]}
worker   {"offer" | "admit" | "withdraw" | "advance" | "finish" | "cancel" | "renew": lease, ...} ─► rank
rank     {"over": lease, "ending": released | cancelled | expired}       ─► worker
"""

import asyncio
import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from baton.worker.ranks.listener import JoiningRank
from kvtransfer.layout import BlockRef, Box, Endpoint, KVLayout, Part
from kvtransfer.memory.reshard import Sharding
from kvtransfer.transfer.leases import CANCELLED, RELEASED
from kvtransfer.transfer.source import Offer, Source, SourceIdentity
from kvtransfer.transfer.ticket import parse_ticket
from kvtransfer.wire import ID_BYTES, Taker, decode_handle, encode_handle, taker_to_proto

OPEN_S = 10.0  # for the ranks to open their ports


@dataclass(slots=True)
class _Spread:
    """One lease: the ranks where it lives, and whether the worker's own has been released."""

    lease_id: bytes
    ranks: set[int]
    is_released: bool = False


class SpreadSource:
    """A Source and those of the ranks, as Handoff uses one. Belongs to the event loop. Use `own` once it is made."""

    own: Source

    def __init__(self, ranks: Sequence[JoiningRank], on_over: Callable[[Hashable, str], None]):
        """`ranks`: in order of their layers; `on_over(key, ending)`: exactly once per lease, when it is over everywhere."""
        self._ranks, self._on_over = ranks, on_over
        self.mint_key = secrets.token_bytes(32)
        self._leases: dict[Hashable, _Spread] = {}
        self._endpoints: list[asyncio.Future[tuple[Endpoint, ...]]] = []

    def sharding(self, layout: KVLayout) -> Sharding:
        """Return what the worker's own pool has of the model."""
        (group,) = layout.groups
        first = self._ranks[0].layers.start
        return Sharding(layout, ((Box(0, range(first), range(group.num_kv_heads)),),), in_whole_pool=True)

    async def start(self, identity: SourceIdentity, ttl_s: float, is_strict: bool) -> None:
        """Let the ranks listen for takers. Raises OSError where one does not."""
        opened = {
            "instance": identity.instance.hex(), "epoch": identity.epoch, "model": identity.model_identity.hex(),
            "numerics": identity.numerics_class, "mint": self.mint_key.hex(), "ttl_s": ttl_s, "is_strict": is_strict,
        }  # fmt: skip
        for index, rank in enumerate(self._ranks):
            self._endpoints.append(asyncio.get_running_loop().create_future())
            rank.stream.on_note = lambda told, index=index: self._hear(index, told)
            rank.stream.note({"open": opened})
        try:
            async with asyncio.timeout(OPEN_S):
                await asyncio.gather(*self._endpoints)
        except TimeoutError:
            raise OSError(f"a rank of another host has opened no port for its KV within {OPEN_S:.0f} s") from None

    def offer(
        self, key: Hashable, blocks: Sequence[BlockRef], num_tokens: int, span_hashes: Sequence[bytes],
        chain_parent: bytes, taker: Taker, num_ready_tokens: int = 0, *, states: Sequence[BlockRef] = (),
    ) -> Offer:  # fmt: skip
        """As Source.offer. Layers with a state are not divided: there are no `states`."""
        lease_id = secrets.token_bytes(ID_BYTES)
        offer = self.own.offer(
            key,
            blocks,
            num_tokens,
            span_hashes,
            chain_parent,
            taker,
            num_ready_tokens,
            lease_id=lease_id,
            states=states,
        )
        self._leases[key] = _Spread(lease_id, set(range(len(self._ranks))))
        self._tell(
            lease_id, "offer", blocks=[list(block) for block in blocks], num_tokens=num_tokens,
            span_hashes=[name.hex() for name in span_hashes], chain_parent=chain_parent.hex(),
            taker=taker_to_proto(taker).SerializeToString().hex(), num_ready_tokens=num_ready_tokens,
            ticket=offer.ticket.hex(),
        )  # fmt: skip
        return self._joined(offer)

    def offer_again(self, lease_id: bytes, taker: Taker) -> Offer:
        """As Source.offer_again."""
        offer = self.own.offer_again(lease_id, taker)
        self._tell(lease_id, "admit", ticket=offer.ticket.hex())
        return self._joined(offer)

    def withdraw(self, ticket: bytes) -> None:
        self.own.withdraw(ticket)
        self._tell(parse_ticket(ticket).lease_id, "withdraw", ticket=ticket.hex())

    def advance(self, key: Hashable, upto_token: int, upto_layer: int | None = None) -> None:
        self.own.advance(key, upto_token, upto_layer)
        self._tell_of(key, "advance", upto_token=upto_token, upto_layer=upto_layer)

    def finish(self, key: Hashable) -> None:
        self._tell_of(key, "finish")
        self.own.finish(key)

    def renew(self, lease_id: bytes) -> bool:
        self._tell(lease_id, "renew")
        return self.own.renew(lease_id)

    def cancel(self, key: Hashable) -> None:
        self.own.cancel(key)
        if key in self._leases:  # a rank alone still has it
            self._end(key, CANCELLED)

    def own_over(self, key: Hashable, ending: str) -> None:
        """The worker's own lease is over."""
        lease = self._leases[key]
        if ending == RELEASED and lease.ranks:
            lease.is_released = True
        else:
            self._end(key, ending)

    def _hear(self, index: int, told: dict) -> None:
        if "endpoints" in told:
            self._endpoints[index].set_result(tuple(Endpoint(*each) for each in told["endpoints"]))
            return
        lease_id = bytes.fromhex(told["over"])
        key = next((key for key, lease in self._leases.items() if lease.lease_id == lease_id), None)
        if key is None:
            return
        lease = self._leases[key]
        lease.ranks.discard(index)
        if told["ending"] != RELEASED:
            self.cancel(key)
        elif lease.is_released and not lease.ranks:
            self._end(key, RELEASED)

    def _end(self, key: Hashable, ending: str) -> None:
        lease = self._leases.pop(key)
        if lease.ranks:
            self._tell(lease.lease_id, "cancel")
        self._on_over(key, ending)

    def _tell_of(self, key: Hashable, what: str, **fields) -> None:
        if (lease := self._leases.get(key)) is not None:
            self._tell(lease.lease_id, what, **fields)

    def _tell(self, lease_id: bytes, what: str, **fields) -> None:
        for rank in self._ranks:
            rank.stream.note({what: lease_id.hex(), **fields})

    def _joined(self, offer: Offer) -> Offer:
        """With the parts of the ranks in the handle."""
        handle = decode_handle(offer.handle)
        (group,) = handle.layout.groups
        theirs = (
            Part(0, rank.layers, range(group.num_kv_heads), endpoints.result())
            for rank, endpoints in zip(self._ranks, self._endpoints, strict=True)
        )
        return offer._replace(handle=encode_handle(replace(handle, parts=(*handle.parts, *theirs))))
