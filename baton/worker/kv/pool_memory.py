"""The memory of a worker's KV pool, where other processes may map it; on a GPU with a mirror in host memory."""

from baton.engine.kv.pool import KVPool
from baton.worker.kv.device_pool import device_pool
from kvtransfer.errors import TransferFailed
from kvtransfer.memory.cuda_runtime import find_runtime
from kvtransfer.memory.device_memory import DeviceRegion
from kvtransfer.memory.pools import DevicePool
from kvtransfer.memory.region import Region


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
        if self.gpu_region is not None:
            self.device = device_pool(pool, self.gpu_region, self.allocate(pool.bytes.nbytes))

    def close(self) -> None:
        """Unmap it. Nothing may compute any more."""
        self.region.close()
        if self.gpu_region is not None:
            self.gpu_region.close()
