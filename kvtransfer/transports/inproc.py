"""Move KV within one process: the dialogue uses two queues, the taker copies once from the source's pool."""

import asyncio
import secrets
from collections.abc import Callable, Iterable

from baton.v1 import kv_pb2
from kvtransfer.errors import PeerLost, ProtocolError
from kvtransfer.memory.blocks import BlockMemory
from kvtransfer.transports.socket_connection import SILENCE_S

_listeners: dict[str, "InprocListener"] = {}


class InprocListener:
    """Accept takers of the same event loop, which may read the pool `memory`."""

    def __init__(self, memory: BlockMemory, on_connection: Callable):
        self.name = secrets.token_hex(16)
        self.memory = memory
        self.on_connection = on_connection
        self.loop = asyncio.get_running_loop()
        _listeners[self.name] = self

    async def close(self) -> None:
        del _listeners[self.name]


class InprocConnection:
    """One end of a dialogue within a process."""

    def __init__(self, own_memory: BlockMemory | None):
        self.source_memory: BlockMemory | None = None
        self._own_memory = own_memory
        self._silence_s = SILENCE_S
        self._frames: asyncio.Queue[kv_pb2.KVFrame | None] = asyncio.Queue()
        self._peer: InprocConnection | None = None

    def join(self, peer: "InprocConnection") -> None:
        self._peer, peer._peer = peer, self

    async def share_memory(self) -> None:
        if self._peer:
            self._peer.source_memory = self._own_memory

    async def send(self, frame: kv_pb2.KVFrame, payload: Iterable[list[memoryview]] = ()) -> None:
        """Give a copy of the frame to the other side. Raises PeerLost when the connection is closed."""
        if self._peer is None:
            raise PeerLost("the connection was closed")
        copied = kv_pb2.KVFrame()
        copied.CopyFrom(frame)
        self._peer._frames.put_nowait(copied)

    async def receive(self) -> kv_pb2.KVFrame:
        """Return the next frame. Raises PeerLost when the other side is silent too long or has closed the
        connection."""
        try:
            async with asyncio.timeout(self._silence_s):
                frame = await self._frames.get()
        except TimeoutError as error:
            raise PeerLost(f"the other side was silent for {self._silence_s:g} s") from error
        if frame is None:
            raise PeerLost("the other side closed the connection")
        return frame

    async def receive_payload(self, groups: Iterable[list[memoryview]]) -> None:
        """Raise ProtocolError: where the taker reads, no bytes follow a frame."""
        raise ProtocolError("nothing follows a frame where the taker reads")

    async def drain(self) -> None:
        """Do nothing: the other side has what was sent."""

    def close(self) -> None:
        peer, self._peer = self._peer, None
        self.source_memory = None
        self._frames.put_nowait(None)
        if peer:
            peer._peer = None
            peer._frames.put_nowait(None)


def is_here(address: str) -> bool:
    listener = _listeners.get(address)
    return listener is not None and listener.loop is asyncio.get_running_loop()


async def connect(address: str) -> InprocConnection:
    """Connect to a listener of this event loop. Raises PeerLost if it does not exist."""
    listener = _listeners.get(address)
    if listener is None:
        raise PeerLost("the source is not in this process any more")
    taker, source = InprocConnection(None), InprocConnection(listener.memory)
    taker.join(source)
    listener.on_connection(source)
    return taker
