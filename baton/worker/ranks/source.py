"""Run the source of a rank with a KV pool of its own. The worker's notes (leases.py) say what it leases."""

import asyncio
import logging
from collections.abc import Callable, Hashable

from baton.v1 import kv_pb2
from baton.worker.ranks.notes import OpenOrder
from kvtransfer.errors import KVError
from kvtransfer.layout import BlockRef, PromptKV
from kvtransfer.transfer.leases import LeaseEnding
from kvtransfer.transfer.source import Source, SourceIdentity
from kvtransfer.transfer.ticket import TicketMint
from kvtransfer.transports.endpoints import Address
from kvtransfer.wire import taker_from_proto

GRACE_S = 2.0  # a taker may arrive before the worker's note about its lease

log = logging.getLogger(__name__)


class RankSource:
    """Lease this rank's KV as the worker says. Used in the event loop only."""

    def __init__(self, make: Callable[..., Source], address: Address, send_note: Callable[[dict], None]):
        """Wait for the worker's notes. `make` returns a Source over this rank's pool, given the worker's settings as
        keywords; `send_note` sends notes to the worker."""
        self._make, self._address, self._send_note = make, address, send_note
        self._generations: dict[int, int] = {}  # by block, when it was last offered
        self._source: Source | None = None
        self._opening: asyncio.Task | None = None

    def handle_note(self, note: dict) -> None:
        """Handle a note of the worker."""
        if "open" in note:
            self._opening = asyncio.get_running_loop().create_task(self._open(note["open"]))
        elif (source := self._source) is not None:
            self._do(source, note)

    async def stop(self) -> None:
        """End all leases and dialogues."""
        if self._source is not None:
            await self._source.stop()

    async def _open(self, order: OpenOrder) -> None:
        try:
            identity = SourceIdentity(
                bytes.fromhex(order["instance"]), order["epoch"], bytes.fromhex(order["model"]), order["numerics"]
            )
            source = self._make(
                identity=identity, on_lease_end=self._lease_ended,
                generations=lambda block_id: self._generations.get(block_id, -1),
                lease_ttl_s=order["ttl_s"], mint=TicketMint(bytes.fromhex(order["mint"])), is_strict=order["is_strict"],
                grace_s=GRACE_S,
            )  # fmt: skip
            await source.start(self._address)
        except Exception as error:  # the worker says it, and ends
            self._send_note({"closed": str(error)})
            return
        self._source = source
        self._send_note({"endpoints": [[each.transport, each.address, each.host_id] for each in source.endpoints()]})

    def _do(self, source: Source, note: dict) -> None:
        match note:
            case {"offer": lease}:
                self._offer(source, bytes.fromhex(lease), note)
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

    def _offer(self, source: Source, lease: bytes, note: dict) -> None:
        """Lease with the worker's lease id, which is also the key here, and the worker's ticket."""
        blocks = tuple(BlockRef(*block) for block in note["blocks"])
        self._generations |= {block.block_id: block.generation for block in blocks}
        taker = taker_from_proto(kv_pb2.Taker.FromString(bytes.fromhex(note["taker"])))
        names = tuple(bytes.fromhex(name) for name in note["span_hashes"])
        try:
            prompt = PromptKV(note["num_tokens"], blocks, names, bytes.fromhex(note["chain_parent"]))
            own = source.offer(lease, prompt, taker, num_ready_tokens=note["num_ready_tokens"], lease_id=lease)
        except (KVError, ValueError) as error:  # although the worker's own source has accepted it
            log.error("a lease cannot be given: %s", error)
            self._lease_ended(lease, LeaseEnding.CANCELLED)
            return
        source.admit(lease, bytes.fromhex(note["ticket"]))
        source.withdraw(own.ticket)

    def _lease_ended(self, lease: Hashable, ending: LeaseEnding) -> None:
        assert isinstance(lease, bytes)
        self._send_note({"over": lease.hex(), "ending": ending})
