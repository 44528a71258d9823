"""The source's side of one dialogue."""

import asyncio
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
from kvtransfer.memory.blocks import blocks_of
from kvtransfer.memory.convert import Codec, encode, row_sizes
from kvtransfer.memory.digest import make_digests
from kvtransfer.memory.pools import Pools
from kvtransfer.memory.reshard import Sharding
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.transfer.connections import WANT_S
from kvtransfer.transfer.dialogue import MAX_RANGE_BYTES, MAX_SENT_BYTES, Cursor, converse, end_frame, renew_frame
from kvtransfer.transfer.extent import extent_of
from kvtransfer.transfer.leases import Lease, LeaseTable
from kvtransfer.transfer.mirror_room import MirrorRoom, Side, Stay
from kvtransfer.transfer.ticket import TicketMint
from kvtransfer.transports.transport import Line, run_blocking
from kvtransfer.wire import (
    MAX_FRAME_BYTES,
    Range,
    box_from_proto,
    layout_from_proto,
    range_from_proto,
    range_to_proto,
)

GENERATION_BYTES = 8  # of a block in a Ready
MAX_UNACKED = 4  # ranges under way; the taker's room is what holds the source back
TAKEOVER_S = 1.5  # a live taker is heard every second
_MAX_REPLIES = 64
_MAX_SHARES = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shelf:
    """Hold what every dialogue of a source needs of it."""

    pools: Pools
    sharding: Sharding  # the part of the model in `pools`
    numerics_class: str
    codec: Codec | None
    leases: LeaseTable
    mint: TicketMint
    generations: Callable[[int], int]
    state_generations: Callable[[int], int]
    counters: Counter
    dialogues: dict[tuple[bytes, int], "SourceDialogue"]  # by fetch id and share: one at a time
    room: MirrorRoom | None  # of a pool on a GPU; None: its mirror needs no bound
    grace_s: float  # for which a ticket that another rank has minted may be known there alone


class _Prepared(NamedTuple):
    moved: Range
    digests: np.ndarray
    payload: Iterable[list[memoryview]]


class SourceDialogue:
    """One line, one share of one fetch: from Want to End. A failure ends this dialogue only."""

    def __init__(self, shelf: Shelf, line: Line, transport: str, establish: Callable[[], None]):
        """`establish()` is called when the ticket is checked; what it raises ends the dialogue."""
        self._shelf = shelf
        self._line = line
        self._transport = transport
        self._establish = establish
        self._sends = CAPABILITIES[transport].source_sends
        self._replies: asyncio.Queue[kv_pb2.KVFrame] = asyncio.Queue(_MAX_REPLIES)
        self._prepared: asyncio.Queue[_Prepared] = asyncio.Queue(1)
        self._unacked: deque[Range] = deque()
        self._room = asyncio.Event()
        self._heard, self._over = asyncio.Event(), asyncio.Event()

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
            self._over.set()
            self._line.close()

    async def _tell(self, exc: KVError) -> None:
        try:
            await self._line.send(end_frame(exc.status, str(exc)))
            await self._line.drain()
        except KVError:
            pass  # the other side has gone

    async def _serve(self) -> None:
        want = await self._first()
        lease = await self._authorise(want)
        self._check_want(lease, want)
        name = (want.ticket.fetch_id, want.share)
        while (earlier := self._shelf.dialogues.get(name)) is not None:
            await self._take_over(earlier)
        lease.check_alive()
        self._fetch = lease.begin(want.ticket.fetch_id, want.share, want.num_shares)
        self._shelf.dialogues[name] = self
        try:
            self._establish()
            working = (self._prepare_all(lease), self._announce_all(lease), self._reply())
            await converse(self._listen(lease, want.share), *working)
        finally:
            self._stay.leave_all()
            if self._shelf.dialogues.get(name) is self:
                del self._shelf.dialogues[name]
            self._shelf.leases.leave(lease, self._fetch)

    async def _first(self) -> kv_pb2.Want:
        """Raises PeerLost where it is not there in time, ProtocolError for anything else."""
        try:
            async with asyncio.timeout(WANT_S):
                frame = await self._line.receive()
        except TimeoutError as exc:
            raise PeerLost(f"no Want came within {WANT_S:g} s") from exc
        if frame.WhichOneof("kind") != "want":
            raise ProtocolError("a dialogue begins with Want")
        return frame.want

    async def _take_over(self, earlier: "SourceDialogue") -> None:
        """Take over from a dialogue of the same ticket and share, whose taker has come back before its line was seen to
        break. Raises TicketRefused where that taker is still heard: then the ticket was overheard."""
        earlier._heard.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (earlier._heard, earlier._over)]
        try:
            done, _ = await asyncio.wait(waits, timeout=TAKEOVER_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if waits[0] in done and not earlier._over.is_set():  # not by the event, which another line may have cleared
            log.warning(
                "a KV ticket was shown a second time while its taker is served: refused, on %s", self._transport
            )
            raise TicketRefused("this ticket's taker is being served on another line")
        earlier._line.close()
        for name in [name for name, dialogue in self._shelf.dialogues.items() if dialogue is earlier]:
            del self._shelf.dialogues[name]

    async def _authorise(self, want: kv_pb2.Want) -> Lease:
        """Raises TicketRefused, LeaseExpired, before anything is allocated."""
        self._shelf.mint.check(want.ticket, want.taker_instance, want.taker_epoch)
        if self._shelf.grace_s:
            await self._shelf.leases.arrival(want.ticket.lease_id, want.ticket.fetch_id, self._shelf.grace_s)
        lease = self._shelf.leases.find(want.ticket.lease_id)
        self._shelf.leases.renew(lease.lease_id)
        return lease

    def _check_want(self, lease: Lease, want: kv_pb2.Want) -> None:
        """Check and store what the taker asks for. Raises LayoutMismatch, ProtocolError, before anything is
        allocated."""
        shelf, taker = self._shelf, layout_from_proto(want.layout)
        layout = shelf.sharding.layout
        if want.transport != self._transport:
            raise ProtocolError(f"Want for {want.transport} on a {self._transport} line")
        if not 1 <= want.num_shares <= _MAX_SHARES:
            raise ProtocolError(f"a fetch of {want.num_shares} shares: 1 to {_MAX_SHARES}")
        relation(layout, shelf.numerics_class, taker, shelf.numerics_class)  # classes were compared at the Offer
        box = box_from_proto(want.part, layout)
        self._extent = extent = extent_of(lease, layout, box)
        self._cells = shelf.sharding.cells(shelf.pools.used_by(self._transport), box)
        self._digests = make_digests(want.digest, layout, box, extent.names)
        mirrored = self._cells.memory is shelf.pools.host or self._digests.reads_bytes
        self._stay = Stay(shelf.room if mirrored else None, Side.GIVEN)
        self._in_blocks = want.in_blocks
        if want.in_blocks and (extent.is_state or taker.groups[box.group] != layout.groups[box.group]):
            raise ProtocolError("whole blocks are wanted, but here they are of another size or form")
        self._wire = taker.groups[box.group] if self._sends else self._cells.group  # its form is what travels
        layers = range(self._cells.first_layer, self._cells.first_layer + self._cells.num_layers)
        self._sent, self._acked = (Cursor(want.token_begin, extent.num_tokens, layers) for _ in range(2))
        self._block_ids = [block.block_id for block in extent.blocks]
        self._leased_generations = [block.generation for block in extent.blocks]
        self._ids = shelf.pools.host.check_ids(self._block_ids, extent.is_state)

    async def _listen(self, lease: Lease, share: int) -> None:
        while True:
            frame = await self._line.receive()
            self._heard.set()
            self._check_alive(lease)
            self._shelf.leases.renew(lease.lease_id)
            match frame.WhichOneof("kind"):
                case "ack":
                    self._confirm(lease, range_from_proto(frame.ack.range))
                case "renew":
                    if self._replies.empty():
                        self._replies.put_nowait(renew_frame())
                case "end":
                    return self._end(lease, share, frame.end)
                case kind:
                    raise ProtocolError(f"{kind} from a taker in mid-dialogue")

    def _check_alive(self, lease: Lease) -> None:
        lease.check_alive()
        if self._fetch.is_withdrawn:
            raise TicketRefused("this ticket was withdrawn")

    def _confirm(self, lease: Lease, moved: Range) -> None:
        if not self._unacked or self._unacked[0] != moved:
            raise ProtocolError(f"Ack of {moved}, which is not the oldest range under way")
        self._generations(lease, moved)
        self._unacked.popleft()
        self._stay.leave(moved)
        self._room.set()
        self._acked.take(moved)
        self._shelf.counters["bytes_confirmed"] += self._wire_bytes(moved)
        self._replies.put_nowait(kv_pb2.KVFrame(confirm=kv_pb2.Confirm(range=range_to_proto(moved))))

    def _end(self, lease: Lease, share: int, end: kv_pb2.End) -> None:
        if end.status != "ok":
            self._shelf.counters[f"taker_{end.status}" if end.status.isidentifier() else "taker_internal"] += 1
        elif not self._acked.done:
            raise ProtocolError("the taker ends with ok before everything was confirmed")
        else:
            self._shelf.leases.confirm(lease, self._fetch, share)

    def _wire_bytes(self, moved: Range) -> int:
        rows = (
            self._cells.group.num_kinds
            * self._cells.num_heads
            * (moved.layer_end - moved.layer_begin)
            * moved.num_tokens
        )
        return rows * sum(row_sizes(self._wire))

    def _token_cost(self) -> int:
        """Return the bytes of all layers of one token in a range, raised so that its digests fit into a frame too."""
        one = Range(0, 1, self._cells.first_layer, self._cells.first_layer + self._cells.num_layers)
        digests = self._digests.shape(one)[1] * self._digests.cell_bytes
        return max(1, self._wire_bytes(one), digests * MAX_RANGE_BYTES // (SPAN_TOKENS * MAX_FRAME_BYTES // 2))

    def _max_stretch(self) -> int:
        """Return the number of tokens, whole spans, of which digests of one layer and generations fit into a frame."""
        first = self._cells.first_layer
        _, num_digests = self._digests.shape(Range(0, SPAN_TOKENS, first, first + 1))
        num_blocks = -(-SPAN_TOKENS // self._cells.block_size)
        span_bytes = num_digests * self._digests.cell_bytes + num_blocks * GENERATION_BYTES
        return MAX_FRAME_BYTES // 2 // span_bytes * SPAN_TOKENS

    async def _prepare_all(self, lease: Lease) -> None:
        """Digests a range while the one before it is sent."""
        token_bytes, max_bytes = self._token_cost(), MAX_SENT_BYTES if self._sends else MAX_RANGE_BYTES
        max_stretch = self._max_stretch()
        while True:
            lease.changed.clear()
            self._check_alive(lease)
            mark, sent = self._extent.watermark(lease), self._sent
            moved = None if sent.done else sent.upcoming(mark, token_bytes, max_bytes, max_stretch)
            if moved is None:
                await lease.changed.wait()
                continue
            self._sent.take(moved)
            await self._stay.enter(moved, self._ids[blocks_of(moved, self._cells.block_size)])
            work = math.inf if self._cells.memory.waits else self._wire_bytes(moved)
            digests, payload = await run_blocking(work, self._digest, moved)
            await self._prepared.put(_Prepared(moved, digests, payload))

    async def _announce_all(self, lease: Lease) -> None:
        """Beside the listening: a taker that has everything already says so and goes before it can be shared with."""
        await self._line.share_memory()
        while True:
            moved, digests, payload = await self._prepared.get()
            while len(self._unacked) >= MAX_UNACKED:
                self._room.clear()
                await self._room.wait()
            failpoints.hit("transfer.ready")
            ready = kv_pb2.Ready(range=range_to_proto(moved), generations=self._generations(lease, moved))
            self._digests.write(digests, ready)
            ready.payload_bytes = self._wire_bytes(moved) if self._sends else 0
            ready.is_early = not lease.is_complete
            self._unacked.append(moved)
            await self._line.send(kv_pb2.KVFrame(ready=ready), payload)

    def _digest(self, moved: Range) -> tuple[np.ndarray, Iterable[list[memoryview]]]:
        """Mostly in a thread: digests of the range as it travels, and the buffers that do."""
        self._cells.each(self._ids, moved, self._cells.memory.refresh)
        if self._wire.form != self._cells.form:
            parts = encode(self._cells, self._ids, moved, self._wire, self._shelf.codec)
            digests = self._digests.of_parts(moved, ((each.part, each.staged) for each in parts))
            return digests, [[memoryview(each.flat)] for each in parts]
        digests = self._digests.of_pool(self._cells, self._ids, moved)
        return digests, self._cells.outgoing(self._ids, moved, self._in_blocks) if self._sends else ()

    def _generations(self, lease: Lease, moved: Range) -> list[int]:
        """Return the generations of the blocks that the range touches. Raises StaleBlocks unless they are those of the
        lease."""
        lease.check_alive()
        blocks = blocks_of(moved, self._cells.block_size)
        generation = self._shelf.state_generations if self._extent.is_state else self._shelf.generations
        generations = list(map(generation, self._block_ids[blocks]))
        if generations != self._leased_generations[blocks]:
            raise StaleBlocks("the source has given blocks of this lease to another request")
        return generations

    async def _reply(self) -> None:
        """Send the answers to the taker: they wait for the payload under way, reading and renewing must not."""
        while True:
            await self._line.send(await self._replies.get())
