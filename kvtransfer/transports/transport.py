"""Define the contract of a transport, and choose one for a taker and a source.

A transport gives both sides a KVConnection. It carries frames both ways and, if the source sends, raw bytes after a
Ready frame. With other transports the taker reads the source's memory itself."""

import asyncio
import time
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from baton.tasks import await_despite_cancel
from baton.v1 import kv_pb2
from kvtransfer.capabilities import CAPABILITIES, HOST
from kvtransfer.errors import TransferFailed
from kvtransfer.layout import Endpoint
from kvtransfer.memory.blocks import BlockMemory
from kvtransfer.transports import socket_folder
from kvtransfer.transports.nixl_engine import find_package, has_rdma

INLINE_BYTES = 1 << 20  # more bytes are copied or digested in a thread, so that the event loop keeps running
_RATED_BYTES = 1 << 20
_MAX_RATES = 256


class KVConnection(Protocol):
    """One dialogue's connection. Every wait ends: with PeerLost when the other side is silent for too long."""

    source_memory: BlockMemory | None  # for the taker: the source's pool once it is shared; None if the source sends

    async def share_memory(self) -> None:
        """Let the taker read the pool. The source calls this after the ticket was checked. Raises PeerLost."""

    async def send(self, frame: kv_pb2.KVFrame, payload: Iterable[list[memoryview]] = ()) -> None:
        """Send one frame, followed by `payload`. Raises PeerLost, ProtocolError."""

    async def receive(self) -> kv_pb2.KVFrame:
        """Return the next frame. Raises PeerLost, ProtocolError."""
        ...

    async def read(self, runs: np.ndarray) -> None:
        """Read `runs`, int64 [n, 6] of byte_runs.merged_runs, from the source's pool into the taker's. The taker calls
        this if the transport `reads_runs`. Raises PeerLost, ProtocolError. No byte arrives after it has ended, however
        it ends."""

    async def receive_payload(self, groups: Iterable[list[memoryview]]) -> None:
        """Fill one group of buffers after the other with the bytes that follow a frame. No buffer is written after it
        has ended."""

    async def drain(self) -> None:
        """Wait after the last frame, before `close`, until the other side has read it or a second has passed."""

    def close(self) -> None:
        """Close without waiting; frames that are not yet sent are lost. Idempotent."""


class TransportChoice(NamedTuple):
    """The endpoints that a taker may use, and why."""

    endpoints: tuple[Endpoint, ...]  # best first; the next is tried when one cannot be reached
    reason: str  # one line


def allowed(transports: Sequence[str] | str) -> tuple[str, ...]:
    """Return the named transports; `auto` stands for all but those of `auto_against`. Raises ValueError for an unknown
    name."""
    names = [transports] if isinstance(transports, str) else list(transports)
    unknown = [name for name in names if name != "auto" and name not in CAPABILITIES]
    if unknown or not names:
        raise ValueError(f"transports {', '.join(unknown) or '(none)'}: choose from auto, {', '.join(CAPABILITIES)}")
    auto = CAPABILITIES.keys() - auto_against() if "auto" in names else set()
    return tuple(name for name in CAPABILITIES if name in auto or name in names)


def auto_against() -> dict[str, str]:
    """Return the transports that `auto` leaves out on this machine, and why. They are used if they are named."""
    if not find_package():
        return {"nixl": "not installed here"}
    if not has_rdma():
        return {"nixl": "no RDMA device here, so UCX would run over plain TCP"}
    return {}


def choose(
    endpoints: Sequence[Endpoint], host_id: str, transports: Sequence[str] | str, in_process: Callable[[str], bool],
    memory: Sequence[str] = (HOST,), are_alike: bool = True, broken: Container[str] = (),
) -> TransportChoice:  # fmt: skip
    """Rank a source's endpoints for a taker on `host_id` that may use `transports` and has its pool in `memory`.
    `in_process(address)` returns whether an inproc address is in this process; `are_alike`: both pools' blocks have one
    size and form; `broken`: transports that do not work between the two. Raises TransferFailed, with the reasons, if
    none is left."""
    names, offered = allowed(transports), {endpoint.transport: endpoint for endpoint in endpoints}
    against = auto_against() if "auto" in transports else {}
    fitting, passed_over = [], []
    for name, can in CAPABILITIES.items():
        endpoint = offered.get(name)
        if not set(memory) & set(can.memory):
            passed_over.append(f"{name}: not for a pool in {' and '.join(memory)} memory")
        elif name in broken:
            passed_over.append(f"{name}: did not work with this source")
        elif name not in names:
            passed_over.append(f"{name}: {against.get(name, 'not allowed here')}")
        elif endpoint is None:
            passed_over.append(f"{name}: not offered by the source")
        elif can.reads_runs and not are_alike:
            passed_over.append(f"{name}: not between blocks of two sizes or forms")
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
    return TransportChoice(tuple(fitting), "; ".join((f"{best.name} ({where}, {copies})", *notes)))


def local_host_id(parent: Path | None = None) -> str:
    """Return an id that is equal for two processes exactly when they can meet in the folder `parent` (default: the one
    for temporary files). Two containers differ unless both are given a folder that they share. Raises OSError."""
    return socket_folder.host_id(parent or socket_folder.default_parent())


class Busy:
    """Measure the time in which bytes move, as a context around each move. `seconds` counts overlapping moves once."""

    def __init__(self):
        self.seconds = 0.0
        self._num_open = 0
        self._since = 0.0

    def __enter__(self) -> None:
        if not self._num_open:
            self._since = time.monotonic()
        self._num_open += 1

    def __exit__(self, *exc) -> None:
        self._num_open -= 1
        if not self._num_open:
            self.seconds += time.monotonic() - self._since


class TransferRates:
    """Measure the throughput of transfers by source and transport, as an exponential average."""

    _WEIGHT = 0.3  # of the newest transfer: one slow transfer does not hide the others, three do

    def __init__(self):
        self._bytes_per_s: dict[tuple[bytes, str], float] = {}

    def note(self, source: bytes, transport: str, num_bytes: int, seconds: float) -> None:
        """Add a transfer. Transfers of fewer than _RATED_BYTES do not count: they measure waiting, not moving."""
        if num_bytes < _RATED_BYTES or seconds <= 0:
            return
        key, rate = (source, transport), num_bytes / seconds
        before = self._bytes_per_s.pop(key, rate)
        self._bytes_per_s[key] = before + self._WEIGHT * (rate - before)
        if len(self._bytes_per_s) > _MAX_RATES:
            del self._bytes_per_s[next(iter(self._bytes_per_s))]

    def gigabytes_per_s(self, source: bytes, transport: str) -> float | None:
        rate = self._bytes_per_s.get((source, transport))
        return None if rate is None else rate / 1e9


async def run_blocking(num_bytes: float, function: Callable, *args):
    """Return `function(*args)`, called in a thread if it touches more than INLINE_BYTES. On cancellation the thread is
    still awaited, so nothing is written after this has raised."""
    if num_bytes <= INLINE_BYTES:
        return function(*args)
    return await await_despite_cancel(asyncio.get_running_loop().run_in_executor(None, function, *args))
