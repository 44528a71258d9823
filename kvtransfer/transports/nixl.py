"""Move KV by NIXL: the dialogue uses TCP, and the taker reads the source's pool by RDMA, NVLink or whatever UCX
finds."""

import asyncio
import time
from collections.abc import Callable

import numpy as np

from baton.v1 import kv_pb2
from kvtransfer.errors import ProtocolError
from kvtransfer.memory.byte_runs import check_within
from kvtransfer.transports.mapped_connection import MappedConnection
from kvtransfer.transports.nixl_engine import NixlAgent, NixlPeer, Segment
from kvtransfer.transports.socket_connection import SILENCE_S, SocketConnection, SocketListener
from kvtransfer.transports.tcp import connected, listening
from kvtransfer.wire import MAX_TAKER_FRAME_BYTES

_PROGRESS_S = 0.0005


class NixlListener:
    """Accept takers that read the pool of `agent`."""

    def __init__(self, sock, agent: NixlAgent, block_bytes: int, on_connection: Callable):
        self._agent = agent
        self._block_bytes = block_bytes
        self._connections: set[_NixlSourceConnection] = set()
        self._progressing: asyncio.Task | None = None
        self._listener = SocketListener(sock, self._make_connection, on_connection)
        self.sock = sock

    def _make_connection(self, sock) -> "_NixlSourceConnection":
        connection = _NixlSourceConnection(sock, self._agent, self._block_bytes, self._connections)
        self._connections.add(connection)
        if self._progressing is None or self._progressing.done():
            self._progressing = asyncio.create_task(self._progress())
        return connection

    async def _progress(self) -> None:
        """Poll NIXL as long as a taker may be reading; a taker whose connection broke still waits for the reads it has
        begun."""
        last = time.monotonic()
        while self._connections or time.monotonic() - last < SILENCE_S:
            last = time.monotonic() if self._connections else last
            self._agent.progress()
            await asyncio.sleep(_PROGRESS_S)

    async def close(self) -> None:
        await self._listener.close()
        if self._progressing:
            self._progressing.cancel()
            await asyncio.gather(self._progressing, return_exceptions=True)
        self._agent.close()


class _NixlSourceConnection(SocketConnection):
    def __init__(self, sock, agent: NixlAgent, block_bytes: int, connections: set):
        super().__init__(sock, max_frame_bytes=MAX_TAKER_FRAME_BYTES)
        self._agent = agent
        self._block_bytes = block_bytes
        self._connections = connections

    async def share_memory(self) -> None:
        pool = self._agent.segment
        mapping = kv_pb2.Mapping(
            num_bytes=pool.num_bytes, block_bytes=self._block_bytes, access=self._agent.metadata, base=pool.base,
            device=pool.memory,
        )  # fmt: skip
        await self.send(kv_pb2.KVFrame(mapping=mapping))

    def close(self) -> None:
        super().close()
        self._connections.discard(self)


class _NixlTakerConnection(MappedConnection):
    def __init__(self, sock, agent: NixlAgent, block_bytes: int):
        super().__init__(sock)
        self._agent = agent
        self._block_bytes = block_bytes
        self._peer: NixlPeer | None = None
        self._pool: Segment | None = None

    async def _map(self, mapping: kv_pb2.Mapping) -> None:
        if self._pool is not None or mapping.block_bytes != self._block_bytes:
            raise ProtocolError("a second Mapping, or one of another pool than its handle speaks of")
        try:
            pool = Segment.of(mapping.base, mapping.num_bytes, mapping.device)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        self._peer, self._pool = self._agent.open_peer(mapping.access), pool

    async def read(self, runs: np.ndarray) -> None:
        """Read `runs`, int64 [n, 6] of byte_runs.merged_runs. Raises ProtocolError if the source has not shared its
        memory or a run is outside it, PeerLost as NixlAgent.read."""
        if self._peer is None or self._pool is None:
            raise ProtocolError("Ready before the source has shared its memory")
        check_within(runs, self._pool.num_bytes)
        await self._agent.read(self._peer, self._pool, runs, self._silence_s)

    def close(self) -> None:
        super().close()
        if self._peer is not None:
            self._agent.close_peer(self._peer)
            self._peer = None


async def listen(host: str, agent: NixlAgent, block_bytes: int, on_connection: Callable, port: int = 0) -> NixlListener:
    """Listen for takers; `port` 0: the system chooses. Raises OSError, which names the host."""
    return NixlListener(await listening(host, port), agent, block_bytes, on_connection)


async def connect(address: str, agent: NixlAgent, block_bytes: int) -> SocketConnection:
    """Connect to a source at `address`, host:port. Raises PeerLost."""
    return _NixlTakerConnection(await connected(address), agent, block_bytes)
