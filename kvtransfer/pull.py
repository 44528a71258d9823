"""The taker's side of one dialogue."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from baton.v1 import kv_pb2
from kvtransfer.blocks import BlockMemory
from kvtransfer.dialogue import RENEW_S, Cursor, converse, end_frame, renew_frame
from kvtransfer.digest import cell_digests, num_cells, span_seeds
from kvtransfer.errors import DigestMismatch, KVError, PeerLost, ProtocolError, StaleBlocks, TransferFailed, from_status
from kvtransfer.layout import BlockRef, KVHandle
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.transport import CAPABILITIES, Line, run_blocking
from kvtransfer.wire import Range, layout_to_proto, range_from_proto, range_to_proto

_MAX_WAITING = 4  # ranges in place or announced, not yet digested


class Destination(Protocol):
    """Where a fetch puts KV: the blocks of one request in the taker's pool. Called in the event loop."""

    num_cached_tokens: int  # verified there already, so the fetch begins here; a multiple of 64

    def set_aside(self, upto_token: int) -> Sequence[BlockRef]:
        """Blocks that hold the tokens [0, upto_token), from the first on, the same ones at every call. What it raises
        ends the fetch."""

    def verified(self, upto_token: int) -> None:
        """Digest, generation and lease of everything below were right: it may be attended to and cached."""


class Pull:
    """What one fetch has achieved; `run` may be called again with a new line after the last one was lost."""

    def __init__(self, memory: BlockMemory, handle: KVHandle, destination: Destination):
        self._memory = memory
        self._handle = handle
        self._destination = destination
        self._seeds = span_seeds(handle.span_hashes, handle.chain_parent, handle.num_tokens)
        self._source_ids = np.asarray([block.block_id for block in handle.blocks], np.int64)
        self._blocks: list[BlockRef] = []
        self._ids = np.empty(0, np.int64)  # of _blocks
        self.verified_token = destination.num_cached_tokens
        self.num_bytes = 0
        self.last_ready = self.last_confirm = time.monotonic()

    async def run(self, line: Line, transport: str, want: kv_pb2.Want) -> None:
        """Until everything is verified. Raises PeerLost when the line breaks, another KVError when it is over; no
        byte lands and `verified` is not called once it has raised. The caller closes the line."""
        want.token_begin, want.transport = self.verified_token, transport
        want.layout.CopyFrom(layout_to_proto(self._memory.layout))
        shape = (self.verified_token, self._handle.num_tokens, self._memory.num_layers)
        self._announced, self._confirmed = Cursor(*shape), Cursor(*shape)
        self._acked: deque[Range] = deque()
        self._landed: asyncio.Queue[tuple[Range, np.ndarray]] = asyncio.Queue(_MAX_WAITING)
        self._line, self._sends = line, CAPABILITIES[transport].source_sends
        try:
            await line.send(kv_pb2.KVFrame(want=want))
            if not self._confirmed.done:
                await converse(self._listen(), self._check_all(), self._renew())
            await line.send(end_frame())
        except PeerLost:
            raise
        except KVError as exc:
            await self._tell(exc)
            raise

    async def _tell(self, exc: KVError) -> None:
        try:
            await self._line.send(end_frame(exc.status, str(exc)))
        except KVError:
            pass  # nobody listens any more

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
        digests = self._digests(ready, moved)
        if list(ready.generations) != [block.generation for block in self._source_blocks(moved)]:
            raise StaleBlocks("the source has given blocks of this handle to somebody else")
        num_bytes = self._memory.num_bytes(moved)
        if ready.payload_bytes != (num_bytes if self._sends else 0):
            raise ProtocolError(f"{ready.payload_bytes} bytes follow {moved}, which has {num_bytes}")
        self._make_room(moved.token_end)
        if self._sends:
            await self._line.receive_payload(self._memory.incoming(self._ids, moved))
        await self._landed.put((moved, digests))

    def _digests(self, ready: kv_pb2.Ready, moved: Range) -> np.ndarray:
        num_spans = -(-moved.token_end // SPAN_TOKENS) - moved.token_begin // SPAN_TOKENS
        shape = (num_spans, num_cells(self._memory, moved.layer_begin, moved.layer_end))
        if len(ready.digests) != shape[0] * shape[1]:
            raise DigestMismatch(f"{len(ready.digests)} digests for {shape[0]} spans of {shape[1]} cells")
        return np.array(ready.digests, np.uint64).reshape(shape)

    def _source_blocks(self, moved: Range) -> tuple[BlockRef, ...]:
        size = self._memory.layout.block_size
        return self._handle.blocks[moved.token_begin // size : -(-moved.token_end // size)]

    def _make_room(self, upto_token: int) -> None:
        blocks = list(self._destination.set_aside(upto_token))
        if len(blocks) < self._memory.layout.num_blocks(upto_token):
            raise TransferFailed(f"the destination set {len(blocks)} blocks aside for {upto_token} tokens")
        known = min(len(blocks), len(self._blocks))
        if blocks[:known] != self._blocks[:known]:
            raise StaleBlocks("the destination has given blocks of this fetch to somebody else")
        if len(blocks) > known:
            self._blocks = blocks
            self._ids = self._memory.check_ids([block.block_id for block in blocks])

    async def _check_all(self) -> None:
        while True:
            moved, digests = await self._landed.get()
            num_bytes = self._memory.num_bytes(moved)
            source = None if self._sends else self._source_pool()
            await run_blocking(num_bytes, self._place_and_check, source, self._ids, moved, digests)
            self.num_bytes += num_bytes
            self._acked.append(moved)
            await self._line.send(kv_pb2.KVFrame(ack=kv_pb2.Ack(range=range_to_proto(moved))))

    def _source_pool(self) -> BlockMemory:
        source = self._line.source_memory
        if source is None:
            raise ProtocolError("Ready before the source has shared its memory")
        source.check_ids(self._source_ids)
        return source

    def _place_and_check(self, source: BlockMemory | None, ids: np.ndarray, moved: Range, digests: np.ndarray) -> None:
        """In a thread: copies where the taker reads, digests what lies here now. Raises DigestMismatch."""
        if source:
            self._memory.copy_from(source, ids, self._source_ids, moved)
        wrong = np.argwhere(cell_digests(self._memory, ids, moved, self._seeds) != digests)
        if len(wrong):
            token = moved.token_begin + int(wrong[0][0]) * SPAN_TOKENS
            raise DigestMismatch(f"{len(wrong)} cells from token {token} on are not what the source digested")

    def _confirm(self, confirm: kv_pb2.Confirm) -> None:
        moved = range_from_proto(confirm.range)
        if not self._acked or self._acked[0] != moved:
            raise ProtocolError(f"Confirm of {moved}, which is not the oldest range acknowledged")
        self._acked.popleft()
        self._confirmed.take(moved)
        self.last_confirm = time.monotonic()
        if self._confirmed.token > self.verified_token:
            self._destination.verified(self._confirmed.token)
            self.verified_token = self._confirmed.token

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._line.send(renew_frame())
