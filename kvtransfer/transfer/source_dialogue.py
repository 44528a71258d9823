"""Serve one taker: the source's side of a dialogue."""

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from baton import failpoints
from baton.v1 import kv_pb2
from kvtransfer.capabilities import CAPABILITIES
from kvtransfer.compatible import relation
from kvtransfer.errors import KVError, PeerLost, ProtocolError, StaleBlocks, TicketRefused
from kvtransfer.layout import Range
from kvtransfer.memory.blocks import blocks_of
from kvtransfer.memory.convert import Codec, encode, row_sizes
from kvtransfer.memory.digest import make_digests
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.transfer.connections import WANT_S
from kvtransfer.transfer.dialogue import MAX_RANGE_BYTES, MAX_SENT_BYTES, Cursor, converse, end_frame, renew_frame
from kvtransfer.transfer.extent import extent_of
from kvtransfer.transfer.leases import Fetch, Lease, LeaseTable
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.mirror_room import RoomUse, Side
from kvtransfer.transfer.ticket import TicketMint
from kvtransfer.transports.transport import KVConnection, run_blocking
from kvtransfer.wire import MAX_FRAME_BYTES, box_from_proto, layout_from_proto, range_from_proto, range_to_proto

GENERATION_BYTES = 8  # per block in a Ready frame
MAX_UNACKED = 4  # ranges under way, so that a slow taker slows the source down
TAKEOVER_S = 1.5  # a live taker sends something every second
_MAX_REPLIES = 64
_MAX_SHARES = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What all dialogues of a source share."""

    pool: LocalPool
    numerics_class: str
    codec: Codec | None
    leases: LeaseTable
    mint: TicketMint
    generations: Callable[[int], int]
    state_generations: Callable[[int], int]
    counters: Counter
    dialogues: dict[tuple[bytes, int], "SourceDialogue"]  # by fetch id and share; each has one dialogue at a time
    grace_s: float  # how long to wait for news of a ticket that another rank has minted


class _WantedShare:
    """One share of a lease that a taker wants: where it is in the pool, and how it travels."""

    def __init__(self, context: SourceContext, transport: str, lease: Lease, want: kv_pb2.Want):
        """Check the Want. Raises LayoutMismatch, ProtocolError, before anything is allocated."""
        taker, layout = layout_from_proto(want.layout), context.pool.layout
        if want.transport != transport:
            raise ProtocolError(f"Want for {want.transport} on a {transport} connection")
        if not 1 <= want.num_shares <= _MAX_SHARES:
            raise ProtocolError(f"a fetch of {want.num_shares} shares: 1 to {_MAX_SHARES}")
        relation(layout, context.numerics_class, taker, context.numerics_class)  # the offer has compared the classes
        box = box_from_proto(want.part, layout)
        self.index = want.share
        self.extent = extent = extent_of(lease.prompt, layout, box)
        self.cells = cells = context.pool.sharding.cells(context.pool.used_by(transport), box)
        self.digests = make_digests(want.digest, layout, box, extent.names)
        self.is_mirrored = cells.memory is context.pool.host or self.digests.reads_bytes
        self.sends = CAPABILITIES[transport].source_sends
        self._in_blocks = want.in_blocks
        if want.in_blocks and (extent.is_state or taker.groups[box.group] != layout.groups[box.group]):
            raise ProtocolError("whole blocks are wanted, but here they are of another size or form")
        self._wire = taker.groups[box.group] if self.sends else cells.group  # bytes travel in this group's form
        self._codec = context.codec
        layers = range(cells.first_layer, cells.first_layer + cells.num_layers)
        self.sent, self.acked = (Cursor(want.token_begin, extent.num_tokens, layers) for _ in range(2))
        self.block_ids = [block.block_id for block in extent.blocks]
        self.generations = [block.generation for block in extent.blocks]  # at the time of the lease
        self.ids = context.pool.host.check_ids(self.block_ids, extent.is_state)

    def wire_bytes(self, moved: Range) -> int:
        """Return how many bytes of the range travel."""
        rows = (
            self.cells.group.num_kinds * self.cells.num_heads * (moved.layer_end - moved.layer_begin) * moved.num_tokens
        )
        return rows * sum(row_sizes(self._wire))

    def token_cost(self) -> int:
        """Return the bytes of one token over all layers, or more where the digests of a range of MAX_RANGE_BYTES would
        otherwise not fit in a frame."""
        one = Range(0, 1, self.cells.first_layer, self.cells.first_layer + self.cells.num_layers)
        digests = self.digests.shape(one)[1] * self.digests.cell_bytes
        return max(1, self.wire_bytes(one), digests * MAX_RANGE_BYTES // (SPAN_TOKENS * MAX_FRAME_BYTES // 2))

    def max_stretch(self) -> int:
        """Return how many tokens (a multiple of 64) a range of one layer may have so that its digests and generations
        fit in a frame."""
        first = self.cells.first_layer
        _, num_digests = self.digests.shape(Range(0, SPAN_TOKENS, first, first + 1))
        num_blocks = -(-SPAN_TOKENS // self.cells.block_size)
        span_bytes = num_digests * self.digests.cell_bytes + num_blocks * GENERATION_BYTES
        return MAX_FRAME_BYTES // 2 // span_bytes * SPAN_TOKENS

    def digest(self, moved: Range) -> tuple[np.ndarray, Iterable[list[memoryview]]]:
        """Return the digests of the range in the form that travels, and the buffers to send; called mostly in a
        thread."""
        self.cells.each(self.ids, moved, self.cells.memory.refresh)
        if self._wire.form != self.cells.form:
            parts = encode(self.cells, self.ids, moved, self._wire, self._codec)
            digests = self.digests.of_parts(moved, ((each.part, each.staged) for each in parts))
            return digests, [[each.flat.data] for each in parts]
        digests = self.digests.of_pool(self.cells, self.ids, moved)
        return digests, self.cells.outgoing(self.ids, moved, self._in_blocks) if self.sends else ()


class _Prepared(NamedTuple):
    moved: Range
    digests: np.ndarray
    payload: Iterable[list[memoryview]]


class _Delivery:
    """Send one share, from the first token that is wanted until the taker's End."""

    def __init__(
        self,
        context: SourceContext,
        connection: KVConnection,
        lease: Lease,
        fetch: Fetch,
        share: _WantedShare,
        heard: asyncio.Event,
    ):
        """Keep what the dialogue was opened with; `heard` is set on every frame of the taker."""
        self._context = context
        self._connection = connection
        self._lease = lease
        self._fetch = fetch
        self._share = share
        self._heard = heard
        self._replies: asyncio.Queue[kv_pb2.KVFrame] = asyncio.Queue(_MAX_REPLIES)
        self._prepared: asyncio.Queue[_Prepared] = asyncio.Queue(1)
        self._unacked: deque[Range] = deque()
        self._has_room = asyncio.Event()
        self._room_use = RoomUse(context.pool.room if share.is_mirrored else None, Side.SOURCE)

    async def run(self) -> None:
        """Send until the taker ends the dialogue. Raises a KVError."""
        try:
            await converse(self._listen(), self._prepare_all(), self._announce_all(), self._reply())
        finally:
            self._room_use.leave_all()

    async def _listen(self) -> None:
        while True:
            frame = await self._connection.receive()
            self._heard.set()
            self._check_alive()
            self._context.leases.renew(self._lease.lease_id)
            match frame.WhichOneof("kind"):
                case "ack":
                    self._confirm(range_from_proto(frame.ack.range))
                case "renew":
                    if self._replies.empty():
                        self._replies.put_nowait(renew_frame())
                case "end":
                    return self._end(frame.end)
                case kind:
                    raise ProtocolError(f"{kind} from a taker in mid-dialogue")

    def _check_alive(self) -> None:
        self._lease.check_alive()
        if self._fetch.is_withdrawn:
            raise TicketRefused("this ticket was withdrawn")

    def _confirm(self, moved: Range) -> None:
        if not self._unacked or self._unacked[0] != moved:
            raise ProtocolError(f"Ack of {moved}, which is not the oldest range under way")
        self._generations(moved)
        self._unacked.popleft()
        self._room_use.leave(moved)
        self._has_room.set()
        self._share.acked.take(moved)
        self._context.counters["bytes_confirmed"] += self._share.wire_bytes(moved)
        self._replies.put_nowait(kv_pb2.KVFrame(confirm=kv_pb2.Confirm(range=range_to_proto(moved))))

    def _end(self, end: kv_pb2.End) -> None:
        if end.status != "ok":
            self._context.counters[f"taker_{end.status}" if end.status.isidentifier() else "taker_internal"] += 1
        elif not self._share.acked.done:
            raise ProtocolError("the taker ends with ok before everything was confirmed")
        else:
            self._context.leases.confirm(self._lease, self._fetch, self._share.index)

    async def _prepare_all(self) -> None:
        """Digest each range while the range before it is sent."""
        lease, share, sent = self._lease, self._share, self._share.sent
        token_bytes, max_bytes = share.token_cost(), MAX_SENT_BYTES if share.sends else MAX_RANGE_BYTES
        max_stretch = share.max_stretch()
        while True:
            lease.changed.clear()
            self._check_alive()
            mark = share.extent.watermark(lease)
            moved = None if sent.done else sent.upcoming(mark, token_bytes, max_bytes, max_stretch)
            if moved is None:
                await lease.changed.wait()
                continue
            sent.take(moved)
            await self._room_use.enter(moved, share.ids[blocks_of(moved, share.cells.block_size)])
            work = math.inf if share.cells.memory.waits else share.wire_bytes(moved)
            digests, payload = await run_blocking(work, share.digest, moved)
            await self._prepared.put(_Prepared(moved, digests, payload))

    async def _announce_all(self) -> None:
        """Announce the prepared ranges. This runs beside `_listen`, since a taker that already has everything says so
        and leaves before memory can be shared with it."""
        share = self._share
        await self._connection.share_memory()
        while True:
            moved, digests, payload = await self._prepared.get()
            while len(self._unacked) >= MAX_UNACKED:
                self._has_room.clear()
                await self._has_room.wait()
            failpoints.hit("transfer.ready")
            ready = kv_pb2.Ready(range=range_to_proto(moved), generations=self._generations(moved))
            share.digests.write(digests, ready)
            ready.payload_bytes = share.wire_bytes(moved) if share.sends else 0
            ready.is_early = not self._lease.is_complete
            self._unacked.append(moved)
            await self._connection.send(kv_pb2.KVFrame(ready=ready), payload)

    def _generations(self, moved: Range) -> list[int]:
        """Return the generations of the range's blocks. Raises StaleBlocks if they have changed since the lease."""
        self._lease.check_alive()
        share, context = self._share, self._context
        blocks = blocks_of(moved, share.cells.block_size)
        generation = context.state_generations if share.extent.is_state else context.generations
        generations = list(map(generation, share.block_ids[blocks]))
        if generations != share.generations[blocks]:
            raise StaleBlocks("the source has given blocks of this lease to another request")
        return generations

    async def _reply(self) -> None:
        """Send the replies to the taker. They wait for a payload under way, which must not delay reading and
        renewing."""
        while True:
            await self._connection.send(await self._replies.get())


class SourceDialogue:
    """One share of one fetch over one connection, from Want to End. A failure ends only this dialogue."""

    def __init__(self, context: SourceContext, connection: KVConnection, transport: str, establish: Callable[[], None]):
        """Keep what a dialogue needs. `establish()` is called when the ticket is checked; an error that it raises ends
        the dialogue."""
        self._context = context
        self._connection = connection
        self._transport = transport
        self._establish = establish
        self._heard, self._over = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Serve the taker, and close the connection. Raises nothing except cancellation."""
        try:
            await self._serve()
        except PeerLost:
            self._context.counters["peer_lost"] += 1
        except KVError as error:
            self._context.counters[error.status] += 1
            await self._send_end(error)
        except Exception:
            log.exception("a KV dialogue failed")
            self._context.counters["internal"] += 1
            await self._send_end(KVError("the source failed, see its log"))
        finally:
            self._over.set()
            self._connection.close()

    async def _send_end(self, error: KVError) -> None:
        with contextlib.suppress(KVError):  # the other side may be gone
            await self._connection.send(end_frame(error.status, str(error)))
            await self._connection.drain()

    async def _serve(self) -> None:
        context, want = self._context, await self._first()
        lease = await self._authorise(want)
        self._establish()  # before any wait in _take_over: this connection has shown its ticket
        share = _WantedShare(context, self._transport, lease, want)
        name = (want.ticket.fetch_id, want.share)
        while (earlier := context.dialogues.get(name)) is not None:
            await self._take_over(earlier)
        lease.check_alive()
        fetch = lease.begin(want.ticket.fetch_id, want.share, want.num_shares)
        context.dialogues[name] = self
        try:
            await _Delivery(context, self._connection, lease, fetch, share, self._heard).run()
        finally:
            if context.dialogues.get(name) is self:
                del context.dialogues[name]
            context.leases.leave(lease, fetch)

    async def _first(self) -> kv_pb2.Want:
        """Return the Want. Raises PeerLost if none comes within WANT_S, ProtocolError for any other frame."""
        try:
            async with asyncio.timeout(WANT_S):
                frame = await self._connection.receive()
        except TimeoutError as error:
            raise PeerLost(f"no Want came within {WANT_S:g} s") from error
        if frame.WhichOneof("kind") != "want":
            raise ProtocolError("a dialogue begins with Want")
        return frame.want

    async def _take_over(self, earlier: "SourceDialogue") -> None:
        """Replace a dialogue of the same ticket and share: its taker reconnects before the old connection was found
        broken. Raises TicketRefused if the old connection still sends frames, since then the ticket was stolen."""
        earlier._heard.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (earlier._heard, earlier._over)]
        try:
            done, _ = await asyncio.wait(waits, timeout=TAKEOVER_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if waits[0] in done and not earlier._over.is_set():  # `_heard` itself may be cleared by now
            log.warning(
                "a KV ticket was shown a second time while its taker is served: refused, on %s", self._transport
            )
            raise TicketRefused("this ticket's taker is being served on another connection")
        earlier._connection.close()
        for name in [name for name, dialogue in self._context.dialogues.items() if dialogue is earlier]:
            del self._context.dialogues[name]

    async def _authorise(self, want: kv_pb2.Want) -> Lease:
        """Return the lease of the ticket. Raises TicketRefused, LeaseExpired, before anything is allocated."""
        self._context.mint.check(want.ticket, want.taker_instance, want.taker_epoch)
        if self._context.grace_s:
            await self._context.leases.arrival(want.ticket.lease_id, want.ticket.fetch_id, self._context.grace_s)
        lease = self._context.leases.find(want.ticket.lease_id)
        self._context.leases.renew(lease.lease_id)
        return lease
