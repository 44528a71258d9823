"""Run the taker's side of a dialogue: pull one share of a fetch from one rank of a source."""

import asyncio
import contextlib
import math
import time
from collections import deque

import numpy as np

from baton import failpoints
from baton.v1 import kv_pb2
from kvtransfer.capabilities import CAPABILITIES
from kvtransfer.errors import DigestMismatch, KVError, PeerLost, ProtocolError, StaleBlocks, received_error
from kvtransfer.layout import KVHandle, KVLayout, Range
from kvtransfer.memory.blocks import BlockMemory, Cells, blocks_of
from kvtransfer.memory.byte_runs import merged_runs
from kvtransfer.memory.convert import Codec, read
from kvtransfer.memory.digest import make_digests
from kvtransfer.memory.reshard import Share, sharding_of
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.transfer.destination import SharedDestination
from kvtransfer.transfer.dialogue import RENEW_S, Cursor, converse, end_frame, renew_frame
from kvtransfer.transfer.extent import extent_of
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.mirror_room import RoomUse, Side
from kvtransfer.transports.transport import Busy, KVConnection, run_blocking
from kvtransfer.wire import box_to_proto, layout_to_proto, range_from_proto, range_to_proto

_NUM_CHECKING = 2  # ranges checked at a time: one is copied while another is digested, so no thread waits for the loop
_MAX_WAITING = 4  # ranges that are announced or in place, and not yet digested


class Pull:
    """Track one share of a fetch. After a lost dialogue the next one continues where it ended."""

    def __init__(
        self, pool: LocalPool, handle: KVHandle, share: Share, index: int, destination: SharedDestination, digest: str,
        codec: Codec | None,
    ):  # fmt: skip
        """Prepare to pull `share` into the taker's `pool`; `index`: its number among the destination's shares. Raises
        ProtocolError."""
        self.pool = pool
        self.handle = handle
        self.share = share
        self.destination = destination
        self.codec = codec
        self.digest = digest
        self.extent = extent = extent_of(handle.prompt, handle.layout, share.box)
        # Cells are numbered as in the whole model: the same on both sides, whatever their block sizes and forms.
        self.digests = make_digests(digest, handle.layout, share.box, extent.names)
        self.source_sharding = sharding_of(share.part, handle.parts, handle.layout)
        # Both pools store rows alike in blocks of one size, so runs of bytes can be copied as they are.
        self.are_alike = (
            handle.layout.groups[share.box.group] == pool.layout.groups[share.box.group] and not extent.is_state
        )
        # Both pools hold nothing but this share, so whole blocks travel as they are stored.
        is_whole = self.cells_in(pool.host).is_whole
        self.in_blocks = self.are_alike and is_whole and self.source_sharding.shard == (share.box,)
        self.source_ids = np.asarray([block.block_id for block in extent.blocks], np.int64)
        self.generations = [block.generation for block in extent.blocks]  # of the source, when leased
        self.verified_token = destination.num_cached_tokens  # counted in the extent's tokens
        if extent.is_state:  # a state after cached tokens is of no use, unless all tokens are cached
            self.verified_token = int(destination.num_cached_tokens == handle.prompt.num_tokens)
        self.num_bytes = self.num_bytes_early = 0
        self.moving = Busy()
        self.last_ready = self.last_confirm = time.monotonic()
        self._index = index

    @property
    def source(self) -> bytes:
        """Return the instance id of the source."""
        return self.handle.source_instance

    @property
    def source_layout(self) -> KVLayout:
        """Return the layout of the source rank's pool."""
        return self.source_sharding.pool_layout

    @property
    def is_done(self) -> bool:
        return self.verified_token == self.extent.num_tokens

    @property
    def ids(self) -> np.ndarray:
        """Return the taker's blocks, one per block position."""
        return self.destination.state_ids if self.extent.is_state else self.destination.ids

    def cells_in(self, memory: BlockMemory) -> Cells:
        """Return the cells of the share in one of the memories of the taker's pool."""
        return self.pool.sharding.cells(memory, self.share.box)

    def verified(self, upto_token: int) -> None:
        """Note that everything below `upto_token` of the extent is confirmed."""
        self.verified_token = upto_token
        self.destination.verified(self._index, self.handle.prompt.num_tokens if self.extent.is_state else upto_token)

    async def run(self, connection: KVConnection, transport: str, want: kv_pb2.Want) -> None:
        """Pull over one connection until everything is verified. Raises PeerLost when the connection breaks, another
        KVError when the fetch has failed; after that no byte lands and `verified` is not called. The caller closes the
        connection."""
        await TakerDialogue(self, connection, transport).run(want)


class TakerDialogue:
    """One share of one fetch over one connection, from Want to End: the counterpart of SourceDialogue."""

    def __init__(self, pull: Pull, connection: KVConnection, transport: str):
        """Prepare the dialogue. Raises ProtocolError if it cannot begin at the share's verified token."""
        self._pull = pull
        self._connection = connection
        self._transport = transport
        self._sends = CAPABILITIES[transport].source_sends
        self._reads_runs = CAPABILITIES[transport].reads_runs
        self._cells = cells = pull.cells_in(pull.pool.used_by(transport))
        layers = range(cells.first_layer, cells.first_layer + cells.num_layers)
        shape = (pull.verified_token, pull.extent.num_tokens, layers)
        self._announced, self._confirmed = Cursor(*shape), Cursor(*shape)
        self._acked: deque[Range] = deque()
        self._turn = asyncio.Event()  # set when the newest range has been acknowledged
        self._turn.set()
        self._landed: asyncio.Queue[tuple[Range, np.ndarray]] = asyncio.Queue(_MAX_WAITING)
        mirrored = cells.memory is pull.pool.host or pull.digests.reads_bytes
        self._room_use = RoomUse(pull.pool.room if mirrored else None, Side.TAKER)
        self._source_cells: Cells | None = None  # the share in the source's memory, once that is shared

    async def run(self, want: kv_pb2.Want) -> None:
        """Pull as `Pull.run` describes; `want` has the ticket."""
        pull, connection = self._pull, self._connection
        asked = kv_pb2.Want(
            token_begin=pull.verified_token, transport=self._transport, digest=pull.digest,
            part=box_to_proto(pull.share.box), share=pull.share.index, num_shares=pull.share.num_shares,
            layout=layout_to_proto(pull.pool.layout), in_blocks=pull.in_blocks,
        )  # fmt: skip
        asked.MergeFrom(want)
        try:
            await connection.send(kv_pb2.KVFrame(want=asked))
            if not self._confirmed.done:
                checking = (self._check_all() for _ in range(_NUM_CHECKING))
                await converse(self._listen(), *checking, self._renew())
            await connection.send(end_frame())
        except PeerLost:
            raise
        except KVError as error:
            with contextlib.suppress(KVError):  # the other side may be gone
                await connection.send(end_frame(error.status, str(error)))
            raise
        finally:
            self._source_cells = None
            self._room_use.leave_all()

    async def _listen(self) -> None:
        """Handle frames of the source until the last Confirm."""
        while not self._confirmed.done:
            frame = await self._connection.receive()
            match frame.WhichOneof("kind"):
                case "ready":
                    await self._ready(frame.ready)
                case "confirm":
                    self._confirm(frame.confirm)
                case "renew":
                    pass
                case "end":
                    raise received_error(frame.end.status, frame.end.message)
                case kind:
                    raise ProtocolError(f"{kind} from a source in mid-dialogue")

    async def _ready(self, ready: kv_pb2.Ready) -> None:
        """Check the announcement, get blocks, and receive the bytes if the source sends them."""
        pull, moved = self._pull, range_from_proto(ready.range)
        self._announced.take(moved)
        pull.last_ready = time.monotonic()
        digests = pull.digests.read(ready, moved)
        group = pull.handle.layout.groups[pull.share.box.group]
        if list(ready.generations) != pull.generations[blocks_of(moved, group.block_size)]:
            raise StaleBlocks("the source has given blocks of this handle to another request")
        num_bytes = self._cells.num_bytes(moved)
        if ready.payload_bytes != (num_bytes if self._sends else 0):
            raise ProtocolError(f"{ready.payload_bytes} bytes follow {moved}, which has {num_bytes}")
        if pull.extent.is_state:
            pull.destination.make_room_for_state(pull.handle.prompt.num_tokens)
        else:
            pull.destination.make_room(moved.token_end)
        await self._room_use.enter(moved, pull.ids[blocks_of(moved, self._cells.block_size)])
        pull.num_bytes_early += num_bytes if ready.is_early else 0
        if self._sends:
            with pull.moving:
                await self._connection.receive_payload(self._cells.incoming(pull.ids, moved, pull.in_blocks))
        await self._landed.put((moved, digests))

    async def _check_all(self) -> None:
        """Place, check and acknowledge one range after the other."""
        pull = self._pull
        while True:
            moved, digests = await self._landed.get()
            await failpoints.hit_in_task("transfer.landed")
            before, self._turn = self._turn, asyncio.Event()
            mine = self._turn
            num_bytes = self._cells.num_bytes(moved)
            source = None if self._sends or self._reads_runs else self._shared_cells()
            if self._reads_runs:
                with pull.moving:
                    await self._connection.read(self._runs(moved))
            with pull.moving if source else contextlib.nullcontext():
                work = math.inf if self._cells.memory.waits else num_bytes
                await run_blocking(work, self._place_and_check, source, pull.ids, moved, digests)
            self._room_use.leave(moved)
            pull.num_bytes += num_bytes
            await before.wait()  # Acks are sent in the order of the ranges
            await pull.destination.caught_up()
            self._acked.append(moved)
            await self._connection.send(kv_pb2.KVFrame(ack=kv_pb2.Ack(range=range_to_proto(moved))))
            mine.set()

    def _runs(self, moved: Range) -> np.ndarray:
        """Return the range as runs of bytes from the source's pool to the taker's."""
        pull, first, box = self._pull, self._cells.first_layer, self._pull.share.box
        counted = moved._replace(layer_begin=moved.layer_begin - first, layer_end=moved.layer_end - first)
        return merged_runs(
            pull.source_sharding.place(box), pull.pool.sharding.place(box), pull.source_ids, pull.ids, counted
        )

    def _shared_cells(self) -> Cells:
        """Return the cells of the share in the source's memory, found once per connection. Raises ProtocolError."""
        if self._source_cells is None:
            source = self._connection.source_memory
            if source is None:
                raise ProtocolError("Ready before the source has shared its memory")
            pull = self._pull
            source.check_ids(pull.source_ids, pull.extent.is_state)
            self._source_cells = pull.source_sharding.cells(source, pull.share.box)
        return self._source_cells

    def _place_and_check(self, source: Cells | None, ids: np.ndarray, moved: Range, digests: np.ndarray) -> None:
        """Copy the range if the taker reads it, and compare the digests of what travelled; called in a thread. Raises
        DigestMismatch."""
        pull = self._pull
        if source:
            found = read(self._cells, source, ids, pull.source_ids, moved, pull.digests, pull.codec)
        else:
            found = pull.digests.of_pool(self._cells, ids, moved)
        wrong = np.argwhere(found != digests)
        if len(wrong):
            token = moved.token_begin + int(wrong[0][0]) * SPAN_TOKENS
            raise DigestMismatch(f"{len(wrong)} cells from token {token} on are not what the source digested")
        self._cells.each(ids, moved, self._cells.memory.flush)

    def _confirm(self, confirm: kv_pb2.Confirm) -> None:
        pull, moved = self._pull, range_from_proto(confirm.range)
        if not self._acked or self._acked[0] != moved:
            raise ProtocolError(f"Confirm of {moved}, which is not the oldest range acknowledged")
        self._acked.popleft()
        self._confirmed.take(moved)
        pull.last_confirm = time.monotonic()
        if self._confirmed.token > pull.verified_token:
            pull.verified(self._confirmed.token)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._connection.send(renew_frame())
