"""Allocate the memory of a worker's KV pool so that other processes can map it; for a GPU, with a mirror in host
memory."""

import logging
from pathlib import Path

import torch

from baton import system
from baton.engine.kv.pool import KVPool
from baton.worker.kv.device_pool import device_pool
from baton.worker.kv.native_digests import memory_kernels
from kvtransfer.errors import TransferFailed
from kvtransfer.memory.cuda_runtime import find_runtime
from kvtransfer.memory.device_memory import DeviceRegion
from kvtransfer.memory.pools import DevicePool
from kvtransfer.memory.region import Region
from kvtransfer.memory.reshard import Sharding
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.mirror_room import MirrorRoom

GIB = 1 << 30
MEMINFO = Path("/proc/meminfo")

log = logging.getLogger(__name__)


def available_bytes() -> int:
    """Return the host memory that this process could still get: what is available, and at most its container's
    limit."""
    line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    return min(int(line.split()[1]) << 10, system.memory_limit())


def mirror_bytes(pool_bytes: int, gib: float | None, available: int, num_gpus: int) -> int:
    """Return the bytes of host memory that a pool's mirror may use. Without `gib`, half of what is available divided by
    the GPUs of the host, each of which may have two workers."""
    share = available // (2 * max(1, num_gpus)) if gib is None else int(gib * GIB)
    return min(pool_bytes, share)


class PoolMemory:
    """Own a pool's memory. `region`: the pool in host memory, or its mirror; `gpu_region` and `device`: the pool on a
    GPU, or None; `room`: bounds the mirror."""

    def __init__(self, mirror_gib: float | None = None):
        """Allocate nothing yet. `mirror_gib`: host memory that the mirror of a GPU's pool may use; None: see
        `mirror_bytes`."""
        self.mirror_gib = mirror_gib
        self.region: Region | None = None
        self.gpu_region: DeviceRegion | None = None
        self.device: DevicePool | None = None
        self.room: MirrorRoom | None = None
        self._block_bytes = 0

    @property
    def num_mirror_bytes(self) -> int | None:
        """Return the bytes that the mirror uses; None without a mirror."""
        return None if self.room is None else self.room.num_resident * self._block_bytes

    def allocate(self, num_bytes: int) -> Region:
        self.region = Region.create(num_bytes)
        return self.region

    def allocate_on_gpu(self, num_bytes: int, device) -> DeviceRegion:
        """Allocate the pool on a GPU. Raises ValueError, with the size, if there is no room or no libcudart."""
        runtime = find_runtime()
        if runtime is None:
            raise ValueError("device cuda: libcudart was not found; leave --device at auto, or give cpu")
        try:
            self.gpu_region = DeviceRegion(runtime, device.index, num_bytes)
        except TransferFailed as error:
            size = f"{num_bytes / (1 << 30):.2f} GiB"
            raise ValueError(f"out of GPU memory: {size} of KV: {error}; give fewer --num-blocks") from None
        return self.gpu_region

    def mirror(self, pool: KVPool) -> None:
        """Add a mirror in host memory for transports that cannot read a GPU; its pages are allocated when used."""
        if self.gpu_region is None:
            return
        num_bytes, self._block_bytes = pool.whole.nbytes, max(1, pool.layout.block_bytes)
        self.device = device_pool(pool, self.gpu_region, self.allocate(num_bytes).memory)
        most = mirror_bytes(num_bytes, self.mirror_gib, available_bytes(), torch.cuda.device_count())
        log.info(
            "KV that crosses by another transport than cuda_ipc is mirrored in host memory: at most %.2f of %.2f GiB",
            most / GIB, num_bytes / GIB,
        )  # fmt: skip
        self.room = MirrorRoom(pool.num_blocks, max(1, most // self._block_bytes), self._drop)

    def as_local_pool(self, sharding: Sharding) -> LocalPool:
        """Return the pool as kvtransfer uses it. Raises LayoutMismatch for a layout that cannot be moved."""
        return LocalPool.of(
            self.region.memory,
            sharding,
            region=self.region,
            device=self.device,
            kernels=memory_kernels(),
            room=self.room,
        )

    def _drop(self, first_block: int, num_blocks: int) -> None:
        self.region.discard(first_block * self._block_bytes, num_blocks * self._block_bytes)

    def close(self) -> None:
        """Free the memory. Nothing may compute any more."""
        self.region.close()
        if self.gpu_region is not None:
            self.gpu_region.close()
