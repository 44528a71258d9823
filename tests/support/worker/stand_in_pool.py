"""A worker's KV on a GPU that is a stand-in: the engine computes on the CPU, in its memory."""

from types import SimpleNamespace
from typing import Any

from baton.worker.kv.pool_memory import PoolMemory
from kvtransfer.memory.cuda_runtime import CudaRuntime
from kvtransfer.memory.device_memory import DeviceRegion
from tests.support.kvtransfer.cuda_stand_in import Cudart, Host


class StandInPool(PoolMemory):
    """The engine's memory on a GPU of `host`, and what is asked for after it in host memory."""

    def __init__(self, host: Host, mirror_gib: float | None = None):
        super().__init__(mirror_gib)
        self.library = Cudart(host)

    def allocate(self, num_bytes: int) -> Any:
        if self.gpu_region is not None:
            return super().allocate(num_bytes)
        return SimpleNamespace(memory=self.allocate_on_gpu(num_bytes, None), fd=-1)

    def allocate_on_gpu(self, num_bytes: int, device) -> Any:
        """Return memory for an engine on a CPU."""
        self.gpu_region = DeviceRegion(CudaRuntime(self.library), 0, num_bytes)
        return memoryview(self.library.allocations[self.gpu_region.address]).cast("B")[:num_bytes]
