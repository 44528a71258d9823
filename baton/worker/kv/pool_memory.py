"""The memory of a worker's KV pool, where other processes may map it; on a GPU with a mirror in host memory."""

import logging
from pathlib import Path

from baton.engine.kv.pool import KVPool
from baton.worker.kv.device_pool import device_pool
from kvtransfer.errors import TransferFailed
from kvtransfer.memory.cuda_runtime import find_runtime
from kvtransfer.memory.device_memory import DeviceRegion
from kvtransfer.memory.pools import DevicePool
from kvtransfer.memory.region import Region

GIB = 1 << 30
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # cgroups 2 and 1
MEMINFO = Path("/proc/meminfo")

log = logging.getLogger(__name__)


def available_bytes() -> int:
    """Return the host memory that this process could have: what is available, at most its container's limit."""
    line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    sizes = [int(line.split()[1]) << 10]
    for path in LIMITS:
        try:
            sizes.append(int(path.read_text()))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return min(sizes)


class PoolMemory:
    """`region`: the pool in host memory, or its mirror there; `gpu_region` and `device`: the pool on a GPU, or None."""

    def __init__(self):
        self.region: Region | None = None
        self.gpu_region: DeviceRegion | None = None
        self.device: DevicePool | None = None

    def allocate(self, num_bytes: int) -> memoryview:
        self.region = Region.create(num_bytes)
        return self.region.memory

    def allocate_on_gpu(self, num_bytes: int, device) -> DeviceRegion:
        """Raises ValueError with the size where there is no room, or no libcudart to ask."""
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
        """Add host memory beside a pool on a GPU, for the transports that know no other; pages come as they are used."""
        if self.gpu_region is None:
            return
        num_bytes, available = pool.bytes.nbytes, available_bytes()
        if num_bytes > available:
            log.warning(
                "KV that crosses by another transport than cuda_ipc is mirrored in host memory, up to %.1f GiB in time, and "
                "%.1f are available: give this process more, or fewer --num-blocks",
                num_bytes / GIB, available / GIB,
            )  # fmt: skip
        self.device = device_pool(pool, self.gpu_region, self.allocate(num_bytes))

    def close(self) -> None:
        """Unmap it. Nothing may compute any more."""
        self.region.close()
        if self.gpu_region is not None:
            self.gpu_region.close()
