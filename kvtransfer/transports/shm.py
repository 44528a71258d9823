"""Move KV by shared memory: the source sends its pool's descriptor over a unix socket, the taker maps it and copies
once."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.v1 import kv_pb2
from kvtransfer.errors import PeerLost, ProtocolError
from kvtransfer.layout import KVLayout
from kvtransfer.memory.blocks import BlockMemory
from kvtransfer.memory.region import Region
from kvtransfer.transports.mapped_connection import MappedConnection
from kvtransfer.transports.socket_connection import SocketConnection, SocketListener
from kvtransfer.transports.socket_folder import SocketFolder, check_peer, is_gone, socket_path
from kvtransfer.transports.tcp import CONNECT_S
from kvtransfer.wire import MAX_TAKER_FRAME_BYTES

_MAX_IDLE = 8
_IDLE_S = 60.0
WATCH_S = 1.0  # between two checks whether a source's process has ended
_BACKLOG_FULL_S = 0.01  # between two tries to connect

log = logging.getLogger(__name__)


class ShmListener:
    """Accept takers of the pool `region` on a unix socket, in a folder that only this user can enter. `address` is the
    socket as takers find it below the same `parent`."""

    def __init__(self, region: Region, layout: KVLayout, parent: Path, on_connection: Callable):
        """Listen below `parent`. Raises OSError if no socket can be made there."""
        self._folder = SocketFolder(parent)
        self.address = self._folder.address
        sock = self._folder.bind()
        self._listener = SocketListener(
            sock, lambda accepted: _SharingConnection(accepted, region, layout), on_connection
        )

    async def close(self) -> None:
        await self._listener.close()
        self._folder.remove()


class _SharingConnection(SocketConnection):
    def __init__(self, sock: socket.socket, region: Region, layout: KVLayout):
        super().__init__(sock, max_frame_bytes=MAX_TAKER_FRAME_BYTES)
        self._region = region
        self._layout = layout

    async def share_memory(self) -> None:
        mapping = kv_pb2.Mapping(num_bytes=len(self._region.memory), block_bytes=self._layout.block_bytes)
        try:
            descriptor = self._region.open_read_only()
        except OSError as error:
            log.warning("the pool cannot be shared with a taker now: %s", error.strerror)
            raise PeerLost("the pool cannot be shared") from error
        try:
            await self.send_with_fd(kv_pb2.KVFrame(mapping=mapping), descriptor)
        finally:
            os.close(descriptor)


@dataclass(slots=True)
class _Mapped:
    region: Region
    memory: BlockMemory
    source: Path  # its socket
    num_users: int
    idle_since: float


class Mappings:
    """Keep pools of other processes mapped from one fetch to the next, since touching fresh pages costs as much as the
    copy. The pool of a lost process is unmapped with its last user, or within a second if it has none, because the host
    cannot free its memory before. Of the others, those idle for a minute are unmapped at the end of the next fetch.
    Called in the event loop."""

    def __init__(self):
        self._mapped: dict[tuple[int, int], _Mapped] = {}
        self._watching: asyncio.Task | None = None

    def open(self, fd: int, num_bytes: int, layout: KVLayout, source: Path) -> tuple[int, int]:
        """Map the file `fd`, which is owned from now on, or use an existing mapping; return the key for `memory` and
        `close`. Raises ProtocolError, PeerLost."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        mapped = self._mapped.get(key)
        if mapped is not None:
            os.close(fd)
            if len(mapped.region.memory) != num_bytes:
                raise ProtocolError(f"a pool of {len(mapped.region.memory)} bytes was announced with {num_bytes}")
        else:
            region = Region.map(fd, num_bytes)
            mapped = self._mapped[key] = _Mapped(region, BlockMemory(region.memory, layout), source, 0, 0.0)
        mapped.num_users += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="sources of shm")
        return key

    def memory(self, key: tuple[int, int]) -> BlockMemory:
        return self._mapped[key].memory

    def close(self, key: tuple[int, int], lost: bool) -> None:
        mapped = self._mapped[key]
        mapped.num_users -= 1
        mapped.idle_since = 0.0 if lost else time.monotonic()
        idle = sorted((each.idle_since, key) for key, each in self._mapped.items() if not each.num_users)
        for position, (since, key) in enumerate(idle):
            if since < time.monotonic() - _IDLE_S or position < len(idle) - _MAX_IDLE:
                self._mapped.pop(key).region.close()

    def clear(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for mapped in self._mapped.values():
            mapped.region.close()
        self._mapped.clear()

    async def _watch(self) -> None:
        """Unmap unused pools of processes that have ended, as long as any pool is mapped."""
        while self._mapped:
            await asyncio.sleep(WATCH_S)
            gone = [key for key, each in self._mapped.items() if not each.num_users and is_gone(each.source)]
            for key in gone:
                self._mapped.pop(key).region.close()


class _ReadingConnection(MappedConnection):
    def __init__(self, sock: socket.socket, source: Path, mappings: Mappings, layout: KVLayout):
        super().__init__(sock, takes_fds=True)
        self._source = source  # its socket
        self._mappings = mappings
        self._layout = layout
        self._key: tuple[int, int] | None = None
        self._lost = False

    @property
    def source_memory(self) -> BlockMemory | None:
        return self._mappings.memory(self._key) if self._key else None

    async def receive(self) -> kv_pb2.KVFrame:
        try:
            return await super().receive()
        except PeerLost:
            self._lost = True
            raise

    async def _map(self, mapping: kv_pb2.Mapping) -> None:
        descriptor = self.take_fd()
        if descriptor is None or self._key:
            raise ProtocolError("a Mapping without its descriptor, or a second one")
        if mapping.block_bytes != self._layout.block_bytes or mapping.num_bytes < mapping.block_bytes:
            os.close(descriptor)
            raise ProtocolError(f"a pool of {mapping.num_bytes} bytes in blocks of {mapping.block_bytes}, "
                                f"its handle speaks of {self._layout.block_bytes}")  # fmt: skip
        self._key = self._mappings.open(descriptor, mapping.num_bytes, self._layout, self._source)

    def close(self) -> None:
        super().close()
        if self._key:
            key, self._key = self._key, None
            self._mappings.close(key, self._lost)


async def connect(address: str, parent: Path, mappings: Mappings, layout: KVLayout) -> SocketConnection:
    """Connect to the source's socket `address` below `parent`; `layout`: that of the source's pool. Raises PeerLost."""
    sock = await reached(address, parent)
    return _ReadingConnection(sock, Path(socket_path(parent, address)), mappings, layout)


async def _connect(sock: socket.socket, path: str) -> None:
    """Connect, and try again while the listener's backlog is full: a unix socket then fails with EAGAIN, and no poll
    waits for room in it."""
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:
            await asyncio.sleep(_BACKLOG_FULL_S)


async def reached(address: str, parent: Path) -> socket.socket:
    """Return a socket that is connected to `address` below `parent`. Raises PeerLost."""
    try:
        return await _reached(socket_path(parent, address))
    except (OSError, ValueError, TimeoutError) as error:
        raise PeerLost(f"the source cannot be reached at {address}: {error}") from error


async def _reached(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(CONNECT_S):
            await _connect(sock, path)
            check_peer(sock)
    except BaseException:
        sock.close()
        raise
    return sock
