"""A TCP connection with faults, in user space: delayed, throttled, stalled, reset, cut, sliced, spoilt, replayed.

    client ── listen ─[ up ]──► upstream       every fault is of one way or of both, and is switched while bytes flow
           ◄─[ down ]─────────

The kinds are those of toxiproxy. What is below TCP (loss, reordering of packets) is not here.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Collection, Iterator

from tests.support.pace import patience

WAYS = ("up", "down")
_CHUNK_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no seconds: a close sends RST


class _Way:
    """The rules for bytes of one direction."""

    def __init__(self) -> None:
        self.flows = asyncio.Event()
        self.flows.set()
        self.latency_s = self.jitter_s = 0.0
        self.bytes_per_s = 0.0  # 0: as fast as it goes
        self.slice_bytes = _CHUNK_BYTES
        self.limit: int | None = None  # bytes that still pass before the connection is closed
        self.flip: int | None = None  # bytes that still pass before a bit of one is flipped
        self.num_flipped = 0


class _Link:
    """One connection and its two ends."""

    def __init__(self, client: asyncio.StreamWriter, upstream: asyncio.StreamWriter):
        self.writers = (client, upstream)

    def reset(self) -> None:
        for writer in self.writers:
            with contextlib.suppress(OSError):  # closed already
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


class _Loop:
    """All proxies of a process live on one event loop, in a thread of their own."""

    _shared: "asyncio.AbstractEventLoop | None" = None

    @classmethod
    def get(cls) -> asyncio.AbstractEventLoop:
        if cls._shared is None:
            cls._shared = asyncio.new_event_loop()
            threading.Thread(target=cls._shared.run_forever, name="fault proxies", daemon=True).start()
        return cls._shared


class FaultProxy:
    """`address` leads to `upstream` until `close()`. Its methods may be called from any thread; they return when the
    fault is in force."""

    def __init__(self, upstream: str, listen: str = "127.0.0.1:0", seed: int = 0):
        self.upstream = upstream
        self.num_accepted = 0
        self.num_ended = 0  # ends of upstream that have been passed on
        self.recorded = bytearray()  # what clients have sent since `record()`
        self._records = False
        self._refuses = False
        self._slow_close_s = 0.0
        self._random = random.Random(seed)
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task] = set()
        self.address = self._call(self._listen(listen))

    def close(self) -> None:
        self._call(self._close())

    @property
    def num_open(self) -> int:
        return len(self._links)

    # ---- faults ----

    def stall(self, ways: Collection[str] = WAYS) -> None:
        """Let nothing come through any more, not even an end; connections stay, and new ones are accepted."""
        self._call(self._set(ways, lambda way: way.flows.clear()))

    def delay(self, latency_s: float, jitter_s: float = 0.0, ways: Collection[str] = WAYS) -> None:
        def slow(way: _Way) -> None:
            way.latency_s, way.jitter_s = latency_s, jitter_s

        self._call(self._set(ways, slow))

    def throttle(self, bytes_per_s: float, ways: Collection[str] = WAYS) -> None:
        self._call(self._set(ways, lambda way: setattr(way, "bytes_per_s", bytes_per_s)))

    def slice(self, num_bytes: int, ways: Collection[str] = WAYS) -> None:
        """Cut the stream into segments of that many bytes."""
        self._call(self._set(ways, lambda way: setattr(way, "slice_bytes", num_bytes)))

    def limit(self, num_bytes: int, way: str) -> None:
        """Close the connection that carries the next byte after that many, in good order."""
        self._call(self._set((way,), lambda each: setattr(each, "limit", num_bytes)))

    def flip(self, num_bytes: int, way: str) -> None:
        """Flip a bit of the byte that comes after that many."""
        self._call(self._set((way,), lambda each: setattr(each, "flip", num_bytes)))

    def slow_close(self, seconds: float) -> None:
        """Pass an end on that much later."""
        self._slow_close_s = seconds

    def reset(self) -> None:
        """Send RST on every open connection, to both sides."""
        self._call(self._reset())

    def refuse(self) -> None:
        """Send RST on every open connection and on all that come."""
        self._refuses = True
        self.reset()

    def record(self) -> None:
        self.recorded.clear()
        self._records = True

    def replay(self, timeout_s: float = 5.0) -> bytes:
        """Say what was recorded once more, on a connection of its own; what is answered until it ends."""
        host, port = self.upstream.rsplit(":", 1)
        answered = bytearray()
        with socket.create_connection((host, int(port)), timeout_s) as sock:
            try:
                sock.sendall(self.recorded)
                while data := sock.recv(_CHUNK_BYTES):
                    answered += data
            except OSError:  # a reset or a silence is an answer too
                pass
        return bytes(answered)

    def heal(self) -> None:
        """End every fault; what was stalled flows."""
        self._refuses, self._records, self._slow_close_s = False, False, 0.0
        self._call(self._set(WAYS, _heal))

    @property
    def num_flipped(self) -> int:
        return sum(way.num_flipped for way in self._ways.values())

    # ---- the loop's ----

    def _call(self, work):
        return asyncio.run_coroutine_threadsafe(work, _Loop.get()).result(patience(20))

    async def _listen(self, address: str) -> str:
        self._ways = {name: _Way() for name in WAYS}
        host, port = address.rsplit(":", 1)
        self._server = await asyncio.start_server(self._accept, host, int(port))
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def _close(self) -> None:
        self._server.close()
        await self._reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _set(self, ways: Collection[str], change) -> None:
        for name in ways:
            change(self._ways[name])

    async def _reset(self) -> None:
        for link in list(self._links):
            link.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        self._tasks.add(asyncio.current_task())
        try:
            host, port = self.upstream.rsplit(":", 1)
            if self._refuses:
                _Link(writer, writer).reset()
                return
            try:
                to_reader, to_writer = await asyncio.open_connection(host, int(port))
            except OSError:
                _Link(writer, writer).reset()
                return
            link = _Link(writer, to_writer)
            self._links.add(link)
            try:
                await asyncio.gather(
                    self._pump(link, reader, to_writer, "up"), self._pump(link, to_reader, writer, "down")
                )
            finally:
                self._links.discard(link)
                link.close()
        except asyncio.CancelledError:
            pass  # by close(); asyncio's own callback would complain of a task that ends so
        finally:
            self._tasks.discard(asyncio.current_task())

    async def _pump(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        way = self._ways[name]
        try:
            while data := await reader.read(_CHUNK_BYTES):
                if name == "up" and self._records:
                    self.recorded += data
                for piece in _slices(data, way.slice_bytes):
                    await self._hold_up(way, len(piece))
                    piece = self._spoilt(way, piece)
                    writer.write(piece)
                    await writer.drain()
                    if way.limit == 0:
                        link.close()
                        return
            await way.flows.wait()
            await asyncio.sleep(self._slow_close_s)
            writer.write_eof()
            self.num_ended += name == "down"
        except OSError:
            link.close()

    async def _hold_up(self, way: _Way, num_bytes: int) -> None:
        seconds = way.latency_s + self._random.uniform(-way.jitter_s, way.jitter_s)
        if way.bytes_per_s:
            seconds += num_bytes / way.bytes_per_s
        if seconds > 0:
            await asyncio.sleep(seconds)
        await way.flows.wait()

    def _spoilt(self, way: _Way, piece: bytes) -> bytes:
        if way.flip is not None:
            if way.flip < len(piece):
                spoilt = bytearray(piece)
                spoilt[way.flip] ^= 1 << self._random.randrange(8)
                piece, way.flip, way.num_flipped = bytes(spoilt), None, way.num_flipped + 1
            else:
                way.flip -= len(piece)
        if way.limit is not None:
            piece = piece[: way.limit]
            way.limit -= len(piece)
        return piece


def _heal(way: _Way) -> None:
    way.latency_s = way.jitter_s = way.bytes_per_s = 0.0
    way.slice_bytes, way.limit, way.flip = _CHUNK_BYTES, None, None
    way.flows.set()


def _slices(data: bytes, size: int) -> Iterator[bytes]:
    return (data[begin : begin + size] for begin in range(0, len(data), size))
