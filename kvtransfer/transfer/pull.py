"""The taker's side of one dialogue."""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from baton import failpoints
from baton.v1 import kv_pb2
from kvtransfer.capabilities import CAPABILITIES
from kvtransfer.errors import DigestMismatch, KVError, PeerLost, ProtocolError, StaleBlocks, TransferFailed, from_status
from kvtransfer.layout import BlockRef, KVHandle, KVLayout
from kvtransfer.memory.blocks import BlockMemory, Cells, blocks_of
from kvtransfer.memory.byte_runs import merged_runs
from kvtransfer.memory.convert import Codec, read
from kvtransfer.memory.digest import make_digests
from kvtransfer.memory.pools import Pools
from kvtransfer.memory.reshard import Sharding, Share, sharding_of
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.transfer.dialogue import RENEW_S, Cursor, converse, end_frame, renew_frame
from kvtransfer.transfer.extent import extent_of
from kvtransfer.transfer.mirror_room import MirrorRoom, Side, Stay
from kvtransfer.transports.transport import Busy, Line, run_blocking
from kvtransfer.wire import Range, box_to_proto, layout_to_proto, range_from_proto, range_to_proto

_NUM_CHECKING = 2  # ranges at a time: one is copied while another is digested, and no thread waits for the loop
_MAX_WAITING = 4  # ranges in place or announced, not yet digested


class Destination(Protocol):
    """Receive the KV of a fetch: the blocks of one request in the taker's pool. Called in the event loop."""

    num_cached_tokens: int  # verified there already, so the fetch begins here; a multiple of 64

    def set_aside(self, upto_token: int) -> Sequence[BlockRef]:
        """Blocks that hold the tokens [0, upto_token), from the first on, the same ones at every call. What it raises
        ends the fetch."""
        ...

    def state_block(self) -> BlockRef:
        """Return the block for the state behind the last token, where the layout has one."""
        ...

    def verified(self, upto_token: int) -> None:
        """Digest, generation and lease of everything below were right, the state behind it among them: it may be
        attended to and cached."""

    async def caught_up(self) -> None:
        """Wait until what is verified has gone wherever else it must go. The source is let on when it has, and the fetch ends
        then. What this raises ends the fetch."""


class Shelter:
    """Join the shares of one fetch: `destination` is called with what all of them have; of a prompt with a state once that is all,
    since the state is the one behind the last token and goes with no fewer."""

    def __init__(self, memory: BlockMemory, destination: Destination, num_shares: int, handle: KVHandle):
        self.num_cached_tokens = destination.num_cached_tokens
        self._memory = memory
        self._destination = destination
        self._verified = [destination.num_cached_tokens] * num_shares
        self._told = destination.num_cached_tokens
        self._least = 0 if handle.layout.state is None else handle.num_tokens
        self._last: BlockRef | None = None  # of the blocks of `ids`
        self._room = np.empty(0, np.int64)  # for ids; `ids` is the part of it that is known
        self.ids = self.state_ids = self._room  # of the blocks set aside; of the one state

    def make_room(self, upto_token: int) -> None:
        """Look at blocks that were not there before, and at the last that was: a long prompt comes in thousands of ranges,
        each with a few. Raises what the destination raises, TransferFailed, StaleBlocks."""
        blocks, known = self._destination.set_aside(upto_token), len(self.ids)
        if len(blocks) < self._memory.layout.num_blocks(upto_token):
            raise TransferFailed(f"the destination set {len(blocks)} blocks aside for {upto_token} tokens")
        if 0 < known <= len(blocks) and blocks[known - 1] != self._last:
            raise StaleBlocks("the destination has given blocks of this fetch to another request")
        if len(blocks) > known:
            self._append(self._memory.check_ids([block.block_id for block in blocks[known:]]))
            self._last = blocks[-1]

    def _append(self, ids: np.ndarray) -> None:
        known, end = len(self.ids), len(self.ids) + len(ids)
        if end > len(self._room):  # a thread may still read what `ids` was
            self._room = np.concatenate((self.ids, np.empty(2 * end - known, np.int64)))
        self._room[known:end] = ids
        self.ids = self._room[:end]

    def make_room_for_state(self, num_tokens: int) -> None:
        """Make room for the state behind so many tokens, and for them. Raises as `make_room` does."""
        self.make_room(num_tokens)
        found = self._memory.check_ids([self._destination.state_block().block_id], are_states=True)
        if len(self.state_ids) and self.state_ids[0] != found[0]:
            raise StaleBlocks("the destination has given the state of this fetch to another request")
        self.state_ids = found

    def verified(self, share: int, upto_token: int) -> None:
        self._verified[share] = upto_token
        if (common := min(self._verified)) > self._told and common >= self._least:
            self._told = common
            self._destination.verified(common)

    async def caught_up(self) -> None:
        """As the destination's."""
        await self._destination.caught_up()


class Pull:
    """Fetch one share; `run` may be called again with a new line after the last was lost."""

    def __init__(
        self, pools: Pools, sharding: Sharding, handle: KVHandle, share: Share, index: int,
        shelter: Shelter, digest: str, codec: Codec | None, room: MirrorRoom | None,
    ):  # fmt: skip
        """`sharding`: the taker's; `index`: which of the shelter's shares this is; `room`: of the mirror of a pool on a
        GPU, where it is bounded. Raises ProtocolError."""
        self._pools = pools
        self._sharding = sharding
        self._handle = handle
        self._share = share
        self._index = index
        self._shelter = shelter
        self._codec = codec
        self._digest = digest
        self._room = room
        self._cells = self._cells_in(pools.host)
        self._extent = extent = extent_of(handle, handle.layout, share.box)
        # Cells are numbered as in the whole model, the same on both sides whatever their block sizes and forms.
        self._digests = make_digests(digest, handle.layout, share.box, extent.names)
        self._source = sharding_of(share.part, handle.parts, handle.layout)
        # Both pools keep rows alike, in blocks of one size: runs of bytes are at home in both.
        self.are_alike = (
            handle.layout.groups[share.box.group] == sharding.layout.groups[share.box.group] and not extent.is_state
        )
        # And they hold this share and nothing else: whole blocks travel as they are stored.
        self.in_blocks = self.are_alike and self._cells.is_whole and self._source.shard == (share.box,)
        self._source_ids = np.asarray([block.block_id for block in extent.blocks], np.int64)
        self._generations = [block.generation for block in extent.blocks]  # of the source's, when they were leased
        self.verified_token = shelter.num_cached_tokens  # of the extent's
        if extent.is_state:  # one that stands behind cached tokens is not the one behind the last
            self.verified_token = int(shelter.num_cached_tokens == handle.num_tokens)
        self.num_bytes = self.num_bytes_early = 0
        self.moving = Busy()
        self.last_ready = self.last_confirm = time.monotonic()

    def _cells_in(self, memory: BlockMemory) -> Cells:
        return self._sharding.cells(memory, self._share.box)

    @property
    def source(self) -> bytes:
        """Names the worker that is pulled from."""
        return self._handle.source_instance

    @property
    def source_layout(self) -> KVLayout:
        """Return the layout of the pool of the rank that is pulled from."""
        return self._source.pool_layout

    @property
    def is_done(self) -> bool:
        return self.verified_token == self._extent.num_tokens

    @property
    def _ids(self) -> np.ndarray:
        """Return the taker's blocks, one per block position."""
        return self._shelter.state_ids if self._extent.is_state else self._shelter.ids

    async def run(self, line: Line, transport: str, want: kv_pb2.Want) -> None:
        """Until everything is verified. Raises PeerLost when the line breaks, another KVError when it is over; no
        byte lands and `verified` is not called once it has raised. The caller closes the line."""
        share = self._share
        self._cells = cells = self._cells_in(self._pools.used_by(transport))
        layers = range(cells.first_layer, cells.first_layer + cells.num_layers)
        shape = (self.verified_token, self._extent.num_tokens, layers)
        self._announced, self._confirmed = Cursor(*shape), Cursor(*shape)
        self._acked: deque[Range] = deque()
        self._turn = asyncio.Event()  # of the newest range that is placed and checked: it has been acknowledged
        self._turn.set()
        self._landed: asyncio.Queue[tuple[Range, np.ndarray]] = asyncio.Queue(_MAX_WAITING)
        mirrored = cells.memory is self._pools.host or self._digests.reads_bytes
        self._stay = Stay(self._room if mirrored else None, Side.TAKEN)
        self._line, self._sends = line, CAPABILITIES[transport].source_sends
        self._origin: Cells | None = None  # in the source's memory, when it is shared
        self._reads_runs = CAPABILITIES[transport].reads_runs
        asked = kv_pb2.Want(
            token_begin=self.verified_token, transport=transport, digest=self._digest, part=box_to_proto(share.box),
            share=share.index, num_shares=share.num_shares, layout=layout_to_proto(self._sharding.layout),
            in_blocks=self.in_blocks,
        )  # fmt: skip
        asked.MergeFrom(want)
        try:
            await line.send(kv_pb2.KVFrame(want=asked))
            if not self._confirmed.done:
                checking = (self._check_all() for _ in range(_NUM_CHECKING))
                await converse(self._listen(), *checking, self._renew())
            await line.send(end_frame())
        except PeerLost:
            raise
        except KVError as exc:
            await self._tell(exc)
            raise
        finally:
            self._origin = None
            self._stay.leave_all()

    async def _tell(self, exc: KVError) -> None:
        try:
            await self._line.send(end_frame(exc.status, str(exc)))
        except KVError:
            pass  # the other side has gone

    async def _listen(self) -> None:
        """Until the last Confirm."""
        while not self._confirmed.done:
            frame = await self._line.receive()
            match frame.WhichOneof("kind"):
                case "ready":
                    await self._ready(frame.ready)
                case "confirm":
                    self._confirm(frame.confirm)
                case "renew":
                    pass
                case "end":
                    raise from_status(frame.end.status, frame.end.message)
                case kind:
                    raise ProtocolError(f"{kind} from a source in mid-dialogue")

    async def _ready(self, ready: kv_pb2.Ready) -> None:
        """Checks the announcement, makes room, and lets the bytes in where the source sends them."""
        moved = range_from_proto(ready.range)
        self._announced.take(moved)
        self.last_ready = time.monotonic()
        digests = self._digests.read(ready, moved)
        group = self._handle.layout.groups[self._share.box.group]
        if list(ready.generations) != self._generations[blocks_of(moved, group.block_size)]:
            raise StaleBlocks("the source has given blocks of this handle to another request")
        num_bytes = self._cells.num_bytes(moved)
        if ready.payload_bytes != (num_bytes if self._sends else 0):
            raise ProtocolError(f"{ready.payload_bytes} bytes follow {moved}, which has {num_bytes}")
        if self._extent.is_state:
            self._shelter.make_room_for_state(self._handle.num_tokens)
        else:
            self._shelter.make_room(moved.token_end)
        await self._stay.enter(moved, self._ids[blocks_of(moved, self._cells.block_size)])
        self.num_bytes_early += num_bytes if ready.is_early else 0
        if self._sends:
            with self.moving:
                await self._line.receive_payload(self._cells.incoming(self._ids, moved, self.in_blocks))
        await self._landed.put((moved, digests))

    async def _check_all(self) -> None:
        while True:
            moved, digests = await self._landed.get()
            await failpoints.hit_in_task("transfer.landed")
            before, self._turn = self._turn, asyncio.Event()
            mine = self._turn
            num_bytes = self._cells.num_bytes(moved)
            source = None if self._sends or self._reads_runs else self._source_cells()
            if self._reads_runs:
                with self.moving:
                    await self._line.read(self._runs(moved))
            with self.moving if source else contextlib.nullcontext():
                work = math.inf if self._cells.memory.waits else num_bytes
                await run_blocking(work, self._place_and_check, source, self._ids, moved, digests)
            self._stay.leave(moved)
            self.num_bytes += num_bytes
            await before.wait()  # Acks go in the order of the ranges
            await self._shelter.caught_up()
            self._acked.append(moved)
            await self._line.send(kv_pb2.KVFrame(ack=kv_pb2.Ack(range=range_to_proto(moved))))
            mine.set()

    def _runs(self, moved: Range) -> np.ndarray:
        """Return the range as runs of the source's pool and of one's own."""
        first, box = self._cells.first_layer, self._share.box
        counted = moved._replace(layer_begin=moved.layer_begin - first, layer_end=moved.layer_end - first)
        return merged_runs(self._source.place(box), self._sharding.place(box), self._source_ids, self._ids, counted)

    def _source_cells(self) -> Cells:
        """Return what the share is in the source's memory, found once for each line. Raises ProtocolError."""
        if self._origin is None:
            source = self._line.source_memory
            if source is None:
                raise ProtocolError("Ready before the source has shared its memory")
            source.check_ids(self._source_ids, self._extent.is_state)
            self._origin = self._source.cells(source, self._share.box)
        return self._origin

    def _place_and_check(self, source: Cells | None, ids: np.ndarray, moved: Range, digests: np.ndarray) -> None:
        """In a thread: copies where the taker reads, digests what has travelled. Raises DigestMismatch."""
        if source:
            found = read(self._cells, source, ids, self._source_ids, moved, self._digests, self._codec)
        else:
            found = self._digests.of_pool(self._cells, ids, moved)
        wrong = np.argwhere(found != digests)
        if len(wrong):
            token = moved.token_begin + int(wrong[0][0]) * SPAN_TOKENS
            raise DigestMismatch(f"{len(wrong)} cells from token {token} on are not what the source digested")
        self._cells.each(ids, moved, self._cells.memory.flush)

    def _confirm(self, confirm: kv_pb2.Confirm) -> None:
        moved = range_from_proto(confirm.range)
        if not self._acked or self._acked[0] != moved:
            raise ProtocolError(f"Confirm of {moved}, which is not the oldest range acknowledged")
        self._acked.popleft()
        self._confirmed.take(moved)
        self.last_confirm = time.monotonic()
        if self._confirmed.token > self.verified_token:
            self.verified_token = self._confirmed.token
            self._shelter.verified(
                self._index, self._handle.num_tokens if self._extent.is_state else self.verified_token
            )

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._line.send(renew_frame())
