"""CUDA IPC: the source hands the key of its GPU allocation over a unix socket, the taker copies within the GPU, or from
one GPU to another of the same host. Also between two processes on one GPU."""

import asyncio
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from baton.v1 import kv_pb2
from kvtransfer.errors import PeerLost, ProtocolError, TransportBroken
from kvtransfer.memory.byte_runs import HEIGHT, OWN, PITCH, SOURCE, WIDTH, check_within
from kvtransfer.memory.cuda_runtime import HANDLE_BYTES, CudaError, CudaRuntime
from kvtransfer.memory.device_memory import DeviceRegion, OpenRegions
from kvtransfer.transports.mapped_line import MappedLine
from kvtransfer.transports.shm import reached
from kvtransfer.transports.socket_folder import SocketFolder
from kvtransfer.transports.socket_line import SocketLine, SocketListener
from kvtransfer.wire import MAX_TAKER_FRAME_BYTES

_BUSY_S = 0.002  # so long an event is asked for at every turn of the loop, then every _PAUSE_S
_PAUSE_S = 0.0002
_ADDRESS = re.compile(r"(?P<socket>[^@]+)@(?P<gpu>[0-9A-Fa-f:.]{1,31})")


class CudaIpcListener:
    """`address`: the socket below `parent`, and the GPU that holds the pool."""

    def __init__(self, region: DeviceRegion, block_bytes: int, parent: Path, on_line: Callable):
        """Raises OSError when there can be no socket below `parent`, CudaError for memory that cannot be shared."""
        handle, gpu = region.handle, region.runtime.pci_id(region.device)
        self._folder = SocketFolder(parent)
        self.address = f"{self._folder.address}@{gpu}"
        sock = self._folder.bind()
        sizes = {"num_bytes": region.num_bytes, "block_bytes": block_bytes}
        mapping = kv_pb2.Mapping(**sizes, access=handle, device=gpu.encode())
        self._listener = SocketListener(sock, lambda accepted: _CudaSourceLine(accepted, mapping), on_line)

    async def close(self) -> None:
        await self._listener.close()
        self._folder.remove()


class _CudaSourceLine(SocketLine):
    def __init__(self, sock: socket.socket, mapping: kv_pb2.Mapping):
        super().__init__(sock, max_frame_bytes=MAX_TAKER_FRAME_BYTES)
        self._mapping = mapping

    async def share_memory(self) -> None:
        await self.send(kv_pb2.KVFrame(mapping=self._mapping))


class Copier:
    """Keep a taker's resources from one fetch to the next: a stream of its own, so that copies wait for no kernel, and
    the allocations of its sources."""

    def __init__(self, region: DeviceRegion):
        self.region = region
        self.runtime: CudaRuntime = region.runtime
        self.runtime.set_device(region.device)
        self.stream = self.runtime.make_stream()
        self.opened = OpenRegions(self.runtime)

    def close(self) -> None:
        self.runtime.destroy_stream(self.stream)

    async def copy(self, source: int, runs: np.ndarray, within_s: float) -> None:
        """Copy runs of the source's pool into one's own. `source`: its address here; `runs`: int64 [n, 5] of
        byte_runs.merged_runs. Raises PeerLost when the copies have not completed in `within_s`. A copy cannot be
        stopped: however this ends, it has completed, or the GPU is lost."""
        runtime = self.runtime
        runtime.set_device(self.region.device)
        event = runtime.make_event()
        try:
            for run in runs.tolist():
                target = self.region.address + run[OWN]
                runtime.copy(target, source + run[SOURCE], run[WIDTH], run[PITCH], run[HEIGHT], self.stream)
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
            if elapsed_s > within_s:
                raise PeerLost(f"a copy within the GPU has not passed after {within_s:g} s")
            try:
                await asyncio.sleep(0 if elapsed_s < _BUSY_S else _PAUSE_S)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError


class _CudaTakerLine(MappedLine):
    def __init__(self, sock: socket.socket, copier: Copier, block_bytes: int):
        super().__init__(sock)
        self._copier = copier
        self._block_bytes = block_bytes
        self._mapping = kv_pb2.Mapping()
        self._source = 0

    def _map(self, mapping: kv_pb2.Mapping) -> None:
        if self._source or len(mapping.access) != HANDLE_BYTES or mapping.block_bytes != self._block_bytes:
            raise ProtocolError("a second Mapping, or one of another pool than its handle speaks of")
        try:
            self._source, self._mapping = self._copier.opened.open(mapping.access), mapping
        except CudaError as exc:  # two containers that share no PID or IPC namespace, for one
            raise TransportBroken("cuda_ipc", f"the source's GPU memory cannot be opened here: {exc}") from exc

    async def read(self, runs: np.ndarray) -> None:
        """Copy `runs`, int64 [n, 5] of byte_runs.merged_runs. Raises ProtocolError before the source has shared its
        memory or for runs beyond it, PeerLost as Copier.copy."""
        if not self._source:
            raise ProtocolError("Ready before the source has shared its memory")
        check_within(runs, self._mapping.num_bytes)
        await self._copier.copy(self._source, runs, self._silence_s)

    def close(self) -> None:
        super().close()
        if self._source:
            self._source = 0
            self._copier.opened.close(self._mapping.access)


async def connect(address: str, parent: Path, copier: Copier, block_bytes: int) -> SocketLine:
    """Raises PeerLost, also for a GPU that the taker's cannot read."""
    found = _ADDRESS.fullmatch(address)
    if not found:
        raise PeerLost(f"address {address[:80]!r} names no socket and GPU")
    try:
        reaches = copier.runtime.reaches(copier.region.device, found["gpu"])
    except CudaError as exc:
        raise PeerLost(f"GPU {found['gpu']}: {exc}") from exc
    if not reaches:
        raise PeerLost(f"GPU {found['gpu']} cannot be read from here")
    return _CudaTakerLine(await reached(found["socket"], parent), copier, block_bytes)
