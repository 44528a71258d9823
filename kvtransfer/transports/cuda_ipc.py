"""Move KV by CUDA IPC: the source sends the handle of its GPU allocation over a unix socket, and the taker copies
within one GPU or between two GPUs of one host. Two processes on one GPU can use this too."""

import asyncio
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from baton.v1 import kv_pb2
from kvtransfer.errors import DeviceHangs, PeerLost, ProtocolError, TransportBroken
from kvtransfer.memory.byte_runs import HEIGHT, OWN, OWN_PITCH, SOURCE, SOURCE_PITCH, WIDTH, check_within
from kvtransfer.memory.cuda_runtime import HANDLE_BYTES, CudaError, CudaRuntime
from kvtransfer.memory.device_memory import CANARY_BYTES, DeviceRegion, wrong_canary_bytes
from kvtransfer.transports.mapped_connection import MappedConnection
from kvtransfer.transports.shm import reached
from kvtransfer.transports.socket_connection import SocketConnection, SocketListener
from kvtransfer.transports.socket_folder import SocketFolder, is_gone, socket_path
from kvtransfer.wire import MAX_TAKER_FRAME_BYTES

_BUSY_S = 0.002  # for so long an event is polled at every turn of the event loop, later every _PAUSE_S
_PAUSE_S = 0.0002
OPEN_S = 5.0  # to map a source's pool of tens of GiB, and at first to make a context on its GPU
WATCH_S = 1.0  # between two checks whether a source's process has ended
STUCK_S = 30.0  # a copy takes milliseconds; after this time the GPU hangs
_ADDRESS = re.compile(r"(?P<socket>[^@]+)@(?P<gpu>[0-9A-Fa-f:.]{1,31})")

log = logging.getLogger(__name__)


class CudaIpcListener:
    """Accept takers of a GPU allocation. `address` names the socket below `parent`, and the GPU that holds the pool."""

    def __init__(self, region: DeviceRegion, block_bytes: int, parent: Path, on_connection: Callable):
        """Listen below `parent`. Raises OSError if no socket can be made there, CudaError for memory that cannot be
        shared."""
        handle, gpu = region.handle, region.runtime.pci_id(region.device)
        self._folder = SocketFolder(parent)
        self.address = f"{self._folder.address}@{gpu}"
        sock = self._folder.bind()
        sizes = {"num_bytes": region.num_bytes, "block_bytes": block_bytes, "canary_bytes": CANARY_BYTES}
        mapping = kv_pb2.Mapping(**sizes, access=handle, device=gpu.encode())
        self._listener = SocketListener(sock, lambda accepted: _CudaSourceConnection(accepted, mapping), on_connection)

    async def close(self) -> None:
        await self._listener.close()
        self._folder.remove()


class _CudaSourceConnection(SocketConnection):
    def __init__(self, sock: socket.socket, mapping: kv_pb2.Mapping):
        super().__init__(sock, max_frame_bytes=MAX_TAKER_FRAME_BYTES)
        self._mapping = mapping

    async def share_memory(self) -> None:
        await self.send(kv_pb2.KVFrame(mapping=self._mapping))


class OpenRegions:
    """Keep allocations of other processes open from one fetch to the next. They are known by the source's socket, which
    is new at every start of its process, and are closed when that process has ended, since its memory would not be
    freed before. Opening maps tens of GiB and closing waits for the device, so both run in threads. Called in the event
    loop."""

    def __init__(self, region: DeviceRegion):
        self._region = region
        self._threads = ThreadPoolExecutor(thread_name_prefix="cuda_ipc")
        self._open: dict[tuple[Path, bytes], Future[int]] = {}  # by socket and handle: the address here
        self._users: Counter[tuple[Path, bytes]] = Counter()
        self._watching: asyncio.Task | None = None

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, source: Path, mapping: kv_pb2.Mapping) -> int:
        """Open an allocation, or use an open one; return its address here. `leave` ends the use. Raises TransportBroken
        if it cannot be opened or copies from it arrive wrong."""
        key = (source, mapping.access)
        if key not in self._open:
            self._open[key] = self._threads.submit(self._map, mapping)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="sources of cuda_ipc")
        self._users[key] += 1
        opening = asyncio.wrap_future(self._open[key])
        opening.add_done_callback(lambda done: done.cancelled() or done.exception())  # mark as retrieved
        try:
            async with asyncio.timeout(OPEN_S):
                return await asyncio.shield(opening)
        except BaseException as error:
            self.leave(source, mapping.access)
            if isinstance(error, CudaError):  # two containers that share no PID or IPC namespace, for one
                raise TransportBroken("cuda_ipc", f"the source's GPU memory cannot be opened here: {error}") from error
            if isinstance(error, TimeoutError):
                why = f"the source's GPU memory was not opened within {OPEN_S:g} s"
                raise TransportBroken("cuda_ipc", why) from error
            raise

    def leave(self, source: Path, handle: bytes) -> None:
        """End one use of an allocation, which stays open."""
        key = (source, handle)
        self._users[key] -= 1
        done = self._open[key]
        if done.done() and done.exception() and not self._users[key]:
            del self._open[key], self._users[key]

    def close(self) -> None:
        """Close all allocations. Waits for threads that open or close one. No fetch may be under way."""
        if self._watching is not None:
            self._watching.cancel()
        self._threads.shutdown()
        for key in list(self._open):
            if address := self._taken(key):
                self._region.runtime.close_handle(address)

    def _map(self, mapping: kv_pb2.Mapping) -> int:
        """Open an allocation and check copies from it; called in a thread. Raises CudaError, TransportBroken."""
        region, runtime = self._region, self._region.runtime
        runtime.set_device(region.device)
        address = runtime.open_handle(mapping.access)
        try:
            if mapping.canary_bytes == CANARY_BYTES:
                wrong = wrong_canary_bytes(runtime, region.device, address + mapping.num_bytes)
                if wrong:
                    raise TransportBroken(
                        "cuda_ipc",
                        f"{wrong} of {CANARY_BYTES} bytes copied from the source's GPU arrived wrong: copies between "
                        "GPUs do not work on this machine, although CUDA offers them (IOMMU or ACS, mostly)",
                    )
        except BaseException:
            runtime.close_handle(address)
            raise
        return address

    async def _watch(self) -> None:
        """Close unused allocations of processes that have ended, as long as any allocation is open."""
        while self._open:
            await asyncio.sleep(WATCH_S)
            for key in [key for key in self._open if not self._users[key] and is_gone(key[0])]:
                if address := self._taken(key):
                    await asyncio.get_running_loop().run_in_executor(self._threads, self._unmap, address)

    def _unmap(self, address: int) -> None:
        try:
            self._region.runtime.set_device(self._region.device)
            self._region.runtime.close_handle(address)
        except CudaError as error:
            log.warning("memory of a source that is gone could not be closed: %s", error)

    def _taken(self, key: tuple[Path, bytes]) -> int:
        """Forget an allocation and return its address, which the caller closes; 0 if it is not open yet."""
        done = self._open[key]
        if not done.done():
            return 0
        del self._open[key]
        self._users.pop(key, None)
        return 0 if done.exception() else done.result()


class Copier:
    """Keep a taker's resources from one fetch to the next: the allocations of its sources, and a stream of its own, so
    that copies wait for no kernel."""

    def __init__(self, region: DeviceRegion):
        self.region = region
        self.runtime: CudaRuntime = region.runtime
        self.runtime.set_device(region.device)
        self.stream = self.runtime.make_stream()
        self.opened = OpenRegions(region)

    def close(self) -> None:
        self.opened.close()
        self.runtime.destroy_stream(self.stream)

    async def copy(self, source: int, runs: np.ndarray, within_s: float) -> None:
        """Copy runs of the source's pool, at address `source` here, into the taker's; `runs`: int64 [n, 6] of
        byte_runs.merged_runs. Raises PeerLost if the copies take longer than `within_s`. Copies cannot be stopped, so
        this ends only when they are done and the blocks may be used again. Only after DeviceHangs may a copy still run;
        then the process has to end."""
        runtime = self.runtime
        runtime.set_device(self.region.device)
        event = runtime.make_event()
        try:
            for run in runs.tolist():
                target = self.region.address + run[OWN]
                pitches = run[OWN_PITCH], run[SOURCE_PITCH]
                runtime.copy(target, source + run[SOURCE], run[WIDTH], pitches, run[HEIGHT], self.stream)
            runtime.record(event, self.stream)
            await self._passed(event, within_s)
        except CudaError:
            runtime.synchronize(self.stream)  # what was begun may still be writing
            raise
        finally:
            runtime.destroy_event(event)

    async def _passed(self, event: int, within_s: float) -> None:
        began, cancelled = time.monotonic(), False
        while not self.runtime.has_passed(event):
            elapsed_s = time.monotonic() - began
            if elapsed_s > within_s + STUCK_S:
                raise DeviceHangs(f"a copy within the GPU has not passed after {elapsed_s:.0f} s")
            try:
                await asyncio.sleep(0 if elapsed_s < _BUSY_S else _PAUSE_S)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        if (elapsed_s := time.monotonic() - began) > within_s:
            raise PeerLost(f"a copy within the GPU took {elapsed_s:.1f} s, more than {within_s:g} s")


class _CudaTakerConnection(MappedConnection):
    def __init__(self, sock: socket.socket, path: Path, copier: Copier, block_bytes: int):
        super().__init__(sock)
        self._path = path  # of the source's socket
        self._copier = copier
        self._block_bytes = block_bytes
        self._mapping = kv_pb2.Mapping()
        self._source = 0

    async def _map(self, mapping: kv_pb2.Mapping) -> None:
        if self._source or len(mapping.access) != HANDLE_BYTES or mapping.block_bytes != self._block_bytes:
            raise ProtocolError("a second Mapping, or one of another pool than its handle speaks of")
        source = await self._copier.opened.open(self._path, mapping)
        if self._closed:
            self._copier.opened.leave(self._path, mapping.access)
            raise PeerLost("the connection was closed")
        self._source, self._mapping = source, mapping

    async def read(self, runs: np.ndarray) -> None:
        """Copy `runs`, int64 [n, 6] of byte_runs.merged_runs. Raises ProtocolError if the source has not shared its
        memory or a run is outside it, PeerLost as Copier.copy."""
        if not self._source:
            raise ProtocolError("Ready before the source has shared its memory")
        check_within(runs, self._mapping.num_bytes)
        await self._copier.copy(self._source, runs, self._silence_s)

    def close(self) -> None:
        super().close()
        if self._source:
            self._source = 0
            self._copier.opened.leave(self._path, self._mapping.access)


async def connect(address: str, parent: Path, copier: Copier, block_bytes: int) -> SocketConnection:
    """Connect to a source. Raises PeerLost, also for a GPU whose memory the taker's GPU cannot read."""
    found = _ADDRESS.fullmatch(address)
    if not found:
        raise PeerLost(f"address {address[:80]!r} names no socket and GPU")
    try:
        reaches = copier.runtime.reaches(copier.region.device, found["gpu"])
    except CudaError as error:
        raise PeerLost(f"GPU {found['gpu']}: {error}") from error
    if not reaches:
        raise PeerLost(f"GPU {found['gpu']} cannot be read from here")
    sock = await reached(found["socket"], parent)
    return _CudaTakerConnection(sock, Path(socket_path(parent, found["socket"])), copier, block_bytes)
