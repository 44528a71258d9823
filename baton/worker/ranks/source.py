"""The source of a rank on another host than its worker, whose leases are those that the worker tells of (leases.py)."""

import asyncio
from collections.abc import Hashable, Sequence

from baton.v1 import kv_pb2
from baton.worker.kv.convert import convert_rows
from baton.worker.kv.native_digests import memory_kernels
from baton.worker.ranks.stream import JoinedStream
from kvtransfer.layout import BlockRef, Box, KVLayout
from kvtransfer.memory.region import Region
from kvtransfer.memory.reshard import Sharding
from kvtransfer.transfer.source import Source, SourceIdentity
from kvtransfer.transfer.ticket import TicketMint
from kvtransfer.transports.endpoints import Address
from kvtransfer.transports.transport import local_host_id
from kvtransfer.wire import taker_from_proto

GRACE_S = 2.0  # a taker may be here before the worker's word of its lease


class RankSource:
    """KV of `layers` in a pool that has room for all of `layout`. Belongs to the event loop."""

    def __init__(
        self, region: Region, layout: KVLayout, layers: range, stream: JoinedStream, address: Address,
        transports: Sequence[str],
    ):  # fmt: skip
        self._region, self._layout, self._stream, self._address = region, layout, stream, address
        (group,) = layout.groups
        box = Box(0, layers, range(group.num_kv_heads))
        self._sharding = Sharding(layout, ((box,),), in_whole_pool=True)
        self._transports = transports
        self._generations: dict[int, int] = {}  # of blocks when they were last offered
        self._source: Source | None = None
        self._opening: asyncio.Task | None = None

    def hear(self, told: dict) -> None:
        """Do what the worker tells."""
        if "open" in told:
            self._opening = asyncio.get_running_loop().create_task(self._open(told["open"]))
        elif (source := self._source) is not None:
            self._do(source, told)

    async def stop(self) -> None:
        """End all leases and dialogues."""
        if self._source is not None:
            await self._source.stop()

    async def _open(self, told: dict) -> None:
        identity = SourceIdentity(
            bytes.fromhex(told["instance"]), told["epoch"], bytes.fromhex(told["model"]), told["numerics"]
        )
        source = Source(
            self._region.memory, self._layout, identity, local_host_id(None), self._over,
            generations=lambda block_id: self._generations.get(block_id, -1), region=None, lease_ttl_s=told["ttl_s"],
            transports=self._transports, sharding=self._sharding, mint=TicketMint(bytes.fromhex(told["mint"])),
            codec=convert_rows, is_strict=told["is_strict"], kernels=memory_kernels(), grace_s=GRACE_S,
        )  # fmt: skip
        await source.start(self._address)
        self._source = source
        self._stream.note({"endpoints": [[each.transport, each.address, each.host_id] for each in source.endpoints()]})

    def _do(self, source: Source, told: dict) -> None:
        match told:
            case {"offer": lease}:
                self._offer(source, bytes.fromhex(lease), told)
            case {"admit": lease, "ticket": ticket}:
                source.admit(bytes.fromhex(lease), bytes.fromhex(ticket))
            case {"withdraw": _, "ticket": ticket}:
                source.withdraw(bytes.fromhex(ticket))
            case {"advance": lease, "upto_token": token, "upto_layer": layer}:
                source.advance(bytes.fromhex(lease), token, layer)
            case {"finish": lease}:
                source.finish(bytes.fromhex(lease))
            case {"cancel": lease}:
                source.cancel(bytes.fromhex(lease))
            case {"renew": lease}:
                source.renew(bytes.fromhex(lease))

    def _offer(self, source: Source, lease: bytes, told: dict) -> None:
        """Lease by the worker's name and ticket; the key here is that name."""
        blocks = [BlockRef(*block) for block in told["blocks"]]
        self._generations |= {block.block_id: block.generation for block in blocks}
        taker = taker_from_proto(kv_pb2.Taker.FromString(bytes.fromhex(told["taker"])))
        names = [bytes.fromhex(name) for name in told["span_hashes"]]
        parent = bytes.fromhex(told["chain_parent"])
        own = source.offer(
            lease, blocks, told["num_tokens"], names, parent, taker, told["num_ready_tokens"], lease_id=lease
        )
        source.admit(lease, bytes.fromhex(told["ticket"]))
        source.withdraw(own.ticket)

    def _over(self, lease: Hashable, ending: str) -> None:
        assert isinstance(lease, bytes)
        self._stream.note({"over": lease.hex(), "ending": ending})
