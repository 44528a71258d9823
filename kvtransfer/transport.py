"""What a transport is, what each can do, and which one a taker and a source use.

A transport gives both sides a Line: frames both ways, and raw bytes behind a Ready where the source is the one that
moves them. With the others the taker reads the source's memory itself.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from baton.v1 import kv_pb2
from kvtransfer.blocks import BlockMemory
from kvtransfer.errors import TransferFailed
from kvtransfer.layout import Endpoint

INLINE_BYTES = 1 << 20  # more is copied or digested in a thread, so that the event loop goes on


class Line(Protocol):
    """One dialogue's connection. Every wait in it ends: with PeerLost when the other side is silent for too long."""

    source_memory: BlockMemory | None  # taker's side: the source's pool once it is shared; None where the source sends

    async def share_memory(self) -> None:
        """Source's side, after the ticket was checked: lets the taker read the pool. Raises PeerLost."""

    async def send(self, frame: kv_pb2.KVFrame, payload: Iterable[list[memoryview]] = ()) -> None:
        """One frame, whole, with the bytes behind it. Raises PeerLost, ProtocolError."""

    async def receive(self) -> kv_pb2.KVFrame:
        """The next frame. Raises PeerLost, ProtocolError."""

    async def receive_payload(self, groups: Iterable[list[memoryview]]) -> None:
        """Fills one group of buffers after the other with the bytes behind the frame; none lands once it has ended."""

    async def drain(self) -> None:
        """After the last frame, before `close`: until the other side has read it or a second has passed."""

    def close(self) -> None:
        """Idempotent and immediate; what was not sent is lost."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    name: str
    same_host: bool
    same_process: bool
    source_sends: bool  # bytes follow the Ready frame; else the taker reads the source's memory
    num_copies: int  # of every byte, kernel included


# Best first.
CAPABILITIES = {
    each.name: each
    for each in (
        Capabilities("inproc", same_host=True, same_process=True, source_sends=False, num_copies=1),
        Capabilities("shm", same_host=True, same_process=False, source_sends=False, num_copies=1),
        Capabilities("tcp", same_host=False, same_process=False, source_sends=True, num_copies=2),
    )
}


class Choice(NamedTuple):
    endpoints: tuple[Endpoint, ...]  # best first; the others are tried when it cannot be reached
    reason: str  # one line


def allowed(transports: Sequence[str] | str) -> tuple[str, ...]:
    """`auto` means all. Raises ValueError for an unknown name."""
    names = [transports] if isinstance(transports, str) else list(transports)
    unknown = [name for name in names if name != "auto" and name not in CAPABILITIES]
    if unknown or not names:
        raise ValueError(f"transports {', '.join(unknown) or '(none)'}: choose from auto, {', '.join(CAPABILITIES)}")
    return tuple(CAPABILITIES) if "auto" in names else tuple(name for name in CAPABILITIES if name in names)


def choose(
    endpoints: Sequence[Endpoint], host_id: str, transports: Sequence[str] | str, in_process: Callable[[str], bool]
) -> Choice:
    """Ranks a source's endpoints for a taker on `host_id` that may use `transports`. `in_process(address)` tells
    whether an inproc address is this process. Raises TransferFailed, with the reasons, when none is left."""
    names, offered = allowed(transports), {endpoint.transport: endpoint for endpoint in endpoints}
    fitting, passed_over = [], []
    for name, can in CAPABILITIES.items():
        endpoint = offered.get(name)
        if endpoint is None:
            passed_over.append(f"{name}: not offered by the source")
        elif name not in names:
            passed_over.append(f"{name}: not allowed here")
        elif can.same_host and endpoint.host_id != host_id:
            passed_over.append(f"{name}: another host")
        elif can.same_process and not in_process(endpoint.address):
            passed_over.append(f"{name}: another process")
        else:
            fitting.append(endpoint)
    if not fitting:
        raise TransferFailed(f"no transport between taker and source ({'; '.join(passed_over)})")
    best = CAPABILITIES[fitting[0].transport]
    where = "same process" if best.same_process else "same host" if best.same_host else "network"
    copies = f"{best.num_copies} {'copy' if best.num_copies == 1 else 'copies'}"
    notes = [*passed_over, *(f"{endpoint.transport}: slower" for endpoint in fitting[1:])]
    return Choice(tuple(fitting), f"{best.name} ({where}, {copies}); " + "; ".join(notes))


def local_host_id() -> str:
    """Equal for two processes exactly when they run under one kernel and see the same files (unix sockets included)."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    mounts = os.stat("/proc/self/ns/mnt").st_ino
    return hashlib.sha256(f"{boot}/{mounts}".encode()).hexdigest()[:32]


async def run_blocking(num_bytes: int, function: Callable, *args):
    """`function(*args)`, in a thread when it touches more than INLINE_BYTES. When this is cancelled the thread is
    still awaited: nothing is written any more once it has raised."""
    if num_bytes <= INLINE_BYTES:
        return function(*args)
    future = asyncio.get_running_loop().run_in_executor(None, function, *args)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:
                continue
        if not future.cancelled():
            future.exception()  # seen: the cancellation is what counts
        raise
