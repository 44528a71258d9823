"""Exchange notes (JSON lines) between the event loops of a worker and of a rank on its host; leases.py and fetches.py
list the notes. Bytes are written in hexadecimal."""

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypedDict

from kvtransfer.layout import BlockRef

MAX_NOTE_BYTES = 64 << 20  # blocks and span hashes of the longest prompt
END_S = 2.0  # for the other end to close its ports

log = logging.getLogger(__name__)


class DeviceSettings(TypedDict):
    """The settings of the worker that a rank on a GPU of its host needs."""

    transports: list[str]
    listen_host: str
    advertise_host: str | None
    kv_port: int
    mirror_gib: float | None
    digest: str
    socket_dir: str | None
    tls: list[str] | None  # certificate, key and CA


class OpenOrder(TypedDict):
    """What a rank needs to open its source."""

    instance: str  # bytes
    epoch: int
    model: str  # bytes
    numerics: str
    mint: str  # bytes
    ttl_s: float
    is_strict: bool
    settings: DeviceSettings


class PullOrder(TypedDict):
    """What a rank shall pull, and into which blocks."""

    handle: str  # bytes
    ticket: str  # bytes
    num_cached_tokens: int
    blocks: list[BlockRef]  # as [block_id, generation] where it arrives
    within_s: float


class LocalStream:
    """One end of a stream of notes, over a connected socket. Used in the event loop that `start` ran in."""

    def __init__(self, connected: socket.socket):
        self._socket = connected
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task | None = None
        self.on_note: Callable[[dict], None] = lambda note: None
        self.on_end: Callable[[], None] = lambda: None  # the other end is gone or has closed

    async def start(self) -> None:
        """Begin to read the other end's notes."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MAX_NOTE_BYTES)
        self._reading = asyncio.get_running_loop().create_task(self._read(reader), name="notes of a rank")

    def send_note(self, note: dict) -> None:
        """Send a note; it is lost if the other end is gone."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(note).encode() + b"\n")

    async def stop(self) -> None:
        """Close this direction, and wait until the other end has closed too, END_S at most."""
        if self._writer is None or self._reading is None:
            return
        with suppress(OSError):
            self._writer.write_eof()
        await asyncio.wait([self._reading], timeout=END_S)
        self._reading.cancel()
        self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                try:
                    self.on_note(json.loads(line))
                except Exception:
                    log.exception("a note of a rank failed")
        self.on_end()
