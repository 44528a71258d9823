"""Messages between two threads of two hosts over one gRPC call of raw bytes: a byte that says whether more follows, and
up to CHUNK_BYTES of a message. Notes, JSON, go from one event loop to the other on the same call."""

import asyncio
import json
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc

from baton.engine.parallel.collectives import RankLost
from baton.engine.parallel.stream import Bytes

SERVICE, METHOD = "baton.rank.Raw", "Join"
PATH = f"/{SERVICE}/{METHOD}"
CHUNK_BYTES = 4 << 20
_MORE, _LAST, _NOTE = b"\1", b"\0", b"\2"
BROKEN = (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError, StopAsyncIteration)


class JoinedStream:
    """A RankStream, for threads; made and run in the event loop."""

    shares_memory = False

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._incoming: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._sending = threading.Lock()  # held from the first piece of a message to its last
        self._is_closed = False
        self.num_received = 0
        self.on_note: Callable[[dict], None] = lambda told: None  # in the event loop

    def note(self, told: dict) -> None:
        """Send a note; it is lost where the call has ended."""
        self._put(_NOTE + json.dumps(told).encode())

    def send(self, *parts: Bytes) -> None:
        whole = memoryview(b"".join(parts))
        chunks = [whole[at : at + CHUNK_BYTES] for at in range(0, len(whole), CHUNK_BYTES)]
        with self._sending:
            for chunk in chunks:
                if self._is_closed:
                    raise RankLost("the connection of a rank has ended")
                self._put((_LAST if chunk is chunks[-1] else _MORE) + chunk)

    def receive(self) -> memoryview:
        message = self._incoming.get()
        if message is None:
            self._incoming.put(None)
            raise RankLost("the connection of a rank has ended")
        return message

    def close(self) -> None:
        self._is_closed = True
        self._incoming.put(None)
        self._put(None)

    async def run(self, read: Callable[[], Awaitable[object]], write: Callable[[bytes], Awaitable[None]]) -> None:
        """Carry messages until the call ends, or either side closes this. `read` raises one of BROKEN, or returns no bytes, at
        the end of the call."""
        carrying = [asyncio.create_task(self._read(read)), asyncio.create_task(self._write(write))]
        try:
            await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.close()
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)

    def _put(self, chunk: bytes | None) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the call with it
            self._loop.call_soon_threadsafe(self._outgoing.put_nowait, chunk)

    async def _read(self, read: Callable[[], Awaitable[object]]) -> None:
        chunks: list[bytes] = []
        with suppress(*BROKEN):
            while isinstance(chunk := await read(), bytes):
                self.num_received += 1
                if chunk[:1] == _NOTE:
                    self.on_note(json.loads(chunk[1:]))
                    continue
                chunks.append(chunk[1:])
                if chunk[:1] == _LAST:
                    self._incoming.put(memoryview(bytearray(b"".join(chunks))))
                    chunks = []

    async def _write(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        with suppress(*BROKEN):
            while (chunk := await self._outgoing.get()) is not None:
                await write(chunk)
