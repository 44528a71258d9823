"""The source's side of one dialogue."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.v1 import kv_pb2
from kvtransfer.blocks import BlockMemory
from kvtransfer.dialogue import Cursor, converse, end_frame, renew_frame
from kvtransfer.digest import cell_digests, span_seeds
from kvtransfer.errors import KVError, LayoutMismatch, PeerLost, ProtocolError, StaleBlocks
from kvtransfer.leases import Lease, LeaseTable
from kvtransfer.ticket import TicketMint
from kvtransfer.transport import CAPABILITIES, Line, run_blocking
from kvtransfer.wire import Range, layout_from_proto, range_from_proto, range_to_proto

MAX_UNACKED = 4  # ranges under way; the taker's room is what holds the source back
_MAX_REPLIES = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shelf:
    """What every dialogue of a source needs of it."""

    memory: BlockMemory
    leases: LeaseTable
    mint: TicketMint
    generations: Callable[[int], int]
    counters: Counter
    dialogues: dict[bytes, "Serving"]  # by lease: the newest dialogue takes over


class Serving:
    """One line, one lease: from Want to End. A failure ends this dialogue only."""

    def __init__(self, shelf: Shelf, line: Line, transport: str):
        self._shelf = shelf
        self._line = line
        self._transport = transport
        self._replies: asyncio.Queue[kv_pb2.KVFrame] = asyncio.Queue(_MAX_REPLIES)
        self._unacked: deque[Range] = deque()
        self._room = asyncio.Event()

    async def run(self) -> None:
        """Never raises but for cancellation; the line is closed behind it."""
        try:
            await self._serve()
        except PeerLost:
            self._shelf.counters["peer_lost"] += 1
        except KVError as exc:
            self._shelf.counters[exc.status] += 1
            await self._tell(exc)
        except Exception:
            log.exception("a KV dialogue failed")
            self._shelf.counters["internal"] += 1
            await self._tell(KVError("the source failed, see its log"))
        finally:
            self._line.close()

    async def _tell(self, exc: KVError) -> None:
        try:
            await self._line.send(end_frame(exc.status, str(exc)))
            await self._line.drain()
        except KVError:
            pass  # nobody listens any more

    async def _serve(self) -> None:
        frame = await self._line.receive()
        if frame.WhichOneof("kind") != "want":
            raise ProtocolError("a dialogue begins with Want")
        lease = self._authorise(frame.want)
        sent, self._acked = (Cursor(frame.want.token_begin, lease.num_tokens, lease.num_layers) for _ in range(2))
        earlier, self._shelf.dialogues[lease.lease_id] = self._shelf.dialogues.get(lease.lease_id), self
        if earlier:
            earlier._line.close()  # its taker has come back on a new line
        try:
            await self._line.share_memory()
            await converse(self._listen(lease), self._announce_all(lease, sent), self._reply())
        finally:
            if self._shelf.dialogues.get(lease.lease_id) is self:
                del self._shelf.dialogues[lease.lease_id]

    def _authorise(self, want: kv_pb2.Want) -> Lease:
        """Raises TicketRefused, LeaseExpired, LayoutMismatch, ProtocolError, before anything is allocated."""
        self._shelf.mint.check(want.ticket, want.ticket.lease_id, want.taker_instance, want.taker_epoch)
        lease = self._shelf.leases.find(want.ticket.lease_id)
        layout, own = layout_from_proto(want.layout), self._shelf.memory.layout
        if layout != own:
            raise LayoutMismatch(f"the source keeps {own}, the taker {layout}")
        if want.transport != self._transport:
            raise ProtocolError(f"Want for {want.transport} on a {self._transport} line")
        self._shelf.leases.renew(lease.lease_id)
        return lease

    async def _listen(self, lease: Lease) -> None:
        while True:
            frame = await self._line.receive()
            lease.check_alive()
            self._shelf.leases.renew(lease.lease_id)
            match frame.WhichOneof("kind"):
                case "ack":
                    self._confirm(lease, range_from_proto(frame.ack.range))
                case "renew":
                    if self._replies.empty():
                        self._replies.put_nowait(renew_frame())
                case "end":
                    return self._end(lease, frame.end)
                case kind:
                    raise ProtocolError(f"{kind} from a taker in mid-dialogue")

    def _confirm(self, lease: Lease, moved: Range) -> None:
        if not self._unacked or self._unacked[0] != moved:
            raise ProtocolError(f"Ack of {moved}, which is not the oldest range under way")
        self._generations(lease, moved)
        self._unacked.popleft()
        self._room.set()
        self._acked.take(moved)
        self._shelf.counters["bytes_confirmed"] += self._shelf.memory.num_bytes(moved)
        confirm = kv_pb2.Confirm(range=range_to_proto(moved), num_tokens_confirmed=self._acked.token)
        self._replies.put_nowait(kv_pb2.KVFrame(confirm=confirm))

    def _end(self, lease: Lease, end: kv_pb2.End) -> None:
        if end.status != "ok":
            self._shelf.counters[f"taker_{end.status}" if end.status.isidentifier() else "taker_internal"] += 1
        elif not self._acked.done:
            raise ProtocolError("the taker ends with ok before everything was confirmed")
        else:
            self._shelf.leases.confirm(lease)

    async def _announce_all(self, lease: Lease, sent: Cursor) -> None:
        memory = self._shelf.memory
        ids = memory.check_ids([block.block_id for block in lease.blocks])
        seeds = span_seeds(lease.span_hashes, lease.chain_parent, lease.num_tokens)
        token_bytes = memory.num_bytes(Range(0, 1, 0, lease.num_layers))
        while True:
            lease.changed.clear()
            lease.check_alive()
            moved = None if sent.done else sent.upcoming(lease.watermark, token_bytes)
            if moved is None:
                await lease.changed.wait()
                continue
            while len(self._unacked) >= MAX_UNACKED:
                self._room.clear()
                await self._room.wait()
            sent.take(moved)
            await self._announce(lease, moved, ids, seeds)

    async def _announce(self, lease: Lease, moved: Range, ids: np.ndarray, seeds: np.ndarray) -> None:
        memory, num_bytes = self._shelf.memory, self._shelf.memory.num_bytes(moved)
        digests = await run_blocking(num_bytes, cell_digests, memory, ids, moved, seeds)
        ready = kv_pb2.Ready(range=range_to_proto(moved), generations=self._generations(lease, moved))
        ready.digests.extend(digests.ravel().tolist())
        sends = CAPABILITIES[self._transport].source_sends
        ready.payload_bytes = num_bytes if sends else 0
        self._unacked.append(moved)
        await self._line.send(kv_pb2.KVFrame(ready=ready), memory.outgoing(ids, moved) if sends else ())

    def _generations(self, lease: Lease, moved: Range) -> list[int]:
        """Of the blocks that the range touches, now. Raises StaleBlocks unless they are those of the lease."""
        lease.check_alive()
        size = self._shelf.memory.layout.block_size
        blocks = lease.blocks[moved.token_begin // size : -(-moved.token_end // size)]
        generations = [self._shelf.generations(block.block_id) for block in blocks]
        if generations != [block.generation for block in blocks]:
            raise StaleBlocks("the source has given blocks of this lease to somebody else")
        return generations

    async def _reply(self) -> None:
        """What answers the taker waits for the payload under way; reading and renewing must not."""
        while True:
            await self._line.send(await self._replies.get())
