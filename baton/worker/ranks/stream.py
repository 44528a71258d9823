"""Carry messages between threads of two hosts over one gRPC call of raw bytes: each chunk is a byte that says whether
more follows, and up to CHUNK_BYTES of a message. The same call carries notes (JSON) between the two event loops.

KV is sent when nothing else waits, and when the thread at the other end has written most of the KV before. That thread
says so when it asks for its next message.
"""

import asyncio
import json
import logging
import queue
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc

from baton.engine.parallel.collectives import RankLost
from baton.engine.parallel.stream import Bytes

SERVICE, METHOD = "baton.rank.Raw", "Join"
PATH = f"/{SERVICE}/{METHOD}"
CHUNK_BYTES = 4 << 20
# KV under way to the thread at the other end, which writes it between parts of steps. Less would not fill the link in
# the meantime; with more, a step would wait too long (13 ms at 10 Gbit/s).
MAX_KV_BYTES = 16 << 20
_LAST, _MORE, _NOTE, _LAST_OF_KV, _WRITTEN = b"\0", b"\1", b"\2", b"\3", b"\4"
BROKEN = (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError, StopAsyncIteration)

log = logging.getLogger(__name__)


class JoinedStream:
    """A RankStream. Made and run in the event loop, used by another thread."""

    shares_memory = False

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._incoming: queue.SimpleQueue[tuple[memoryview, bool] | None] = queue.SimpleQueue()  # (message, is it KV)
        self._outgoing: asyncio.Queue[list[bytes] | None] = asyncio.Queue()  # the pieces of each message
        self._num_unwritten = 0  # messages
        self._kv_under_way: deque[int] = deque()  # bytes of each KV message that the other end has not written yet
        self._num_kv_written = 0  # KV messages that the other end has written
        self._has_kv = False  # whether the last `receive` returned KV, which is written when it is called again
        self._turn_of_kv = asyncio.Lock()
        self._has_moved = asyncio.Event()  # set when a message was sent, KV was written, or this was closed
        self._is_closed = False
        self.num_received = 0
        self.on_note: Callable[[dict], None] = lambda note: None  # called in the event loop

    def send_note(self, note: dict) -> None:
        """Send a note; it is lost if the call has ended."""
        self._put([_NOTE + json.dumps(note).encode()])

    def send(self, *parts: Bytes) -> None:
        self._check_open()
        self._put(_in_pieces(b"".join(parts), _LAST))

    async def send_kv(self, *parts: Bytes) -> None:
        """Send KV as one message; called in the event loop. Messages that are sent after this returns arrive later.
        Raises RankLost."""
        message = b"".join(parts)
        async with self._turn_of_kv:
            while not self._is_closed and (self._num_unwritten or not self._has_room(len(message))):
                self._has_moved.clear()
                await self._has_moved.wait()
            self._check_open()
            self._kv_under_way.append(len(message))
            self._enqueue(_in_pieces(message, _LAST_OF_KV))

    async def kv_written(self) -> None:
        """Wait until the other end has written all KV that was sent so far. Raises RankLost."""
        last = self._num_kv_written + len(self._kv_under_way)
        while not self._is_closed and self._num_kv_written < last:
            self._has_moved.clear()
            await self._has_moved.wait()
        self._check_open()

    def receive(self) -> memoryview:
        if self._has_kv:
            self._put([_WRITTEN])
        came = self._incoming.get()
        if came is None:
            self._incoming.put(None)
            raise RankLost("the connection of a rank has ended")
        message, self._has_kv = came
        return message

    def close(self) -> None:
        self._is_closed = True
        self._incoming.put(None)
        self._put(None)

    async def run(self, read: Callable[[], Awaitable[object]], write: Callable[[bytes], Awaitable[None]]) -> None:
        """Carry messages until the call ends or either side closes this. At the end of the call `read` raises one of
        BROKEN, or returns something else than bytes."""
        carrying = [asyncio.create_task(self._read(read)), asyncio.create_task(self._write(write))]
        try:
            await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.close()
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RankLost("the connection of a rank has ended")

    def _has_room(self, num_bytes: int) -> bool:
        """Return whether a KV message may be sent now; one larger than MAX_KV_BYTES is sent alone."""
        return not self._kv_under_way or sum(self._kv_under_way) + num_bytes <= MAX_KV_BYTES

    def _put(self, pieces: list[bytes] | None) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the call with it
            self._loop.call_soon_threadsafe(self._enqueue, pieces)

    def _enqueue(self, pieces: list[bytes] | None) -> None:
        self._num_unwritten += 1
        self._outgoing.put_nowait(pieces)
        if pieces is None:
            self._has_moved.set()

    async def _read(self, read: Callable[[], Awaitable[object]]) -> None:
        chunks: list[bytes] = []
        with suppress(*BROKEN):
            while isinstance(chunk := await read(), bytes):
                self.num_received += 1
                kind = chunk[:1]
                if kind == _NOTE:
                    try:
                        self.on_note(json.loads(chunk[1:]))
                    except Exception:
                        log.exception("a note of a rank failed")
                    continue
                if kind == _WRITTEN:
                    self._kv_under_way.popleft()
                    self._num_kv_written += 1
                    self._has_moved.set()
                    continue
                chunks.append(chunk[1:])
                if kind != _MORE:
                    self._incoming.put((memoryview(bytearray(b"".join(chunks))), kind == _LAST_OF_KV))
                    chunks = []

    async def _write(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        with suppress(*BROKEN):
            while (pieces := await self._outgoing.get()) is not None:
                for piece in pieces:
                    await write(piece)
                self._num_unwritten -= 1
                self._has_moved.set()


def _in_pieces(message: bytes, last: bytes) -> list[bytes]:
    """Return the message in chunks; the last chunk begins with `last`."""
    begins = range(0, len(message), CHUNK_BYTES)
    return [(last if at == begins[-1] else _MORE) + message[at : at + CHUNK_BYTES] for at in begins]
