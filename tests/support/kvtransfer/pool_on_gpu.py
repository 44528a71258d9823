"""A pool on a GPU as a worker has it, over the stand-in for libcudart; and the bytes of one."""

import numpy as np
import torch

from baton.worker.kv.device_pool import Crossing
from kvtransfer.memory.cuda_runtime import CudaRuntime
from kvtransfer.memory.device_memory import DeviceRegion
from kvtransfer.memory.pools import DevicePool
from kvtransfer.memory.region import Region
from tests.support.kvtransfer.cuda_stand_in import Cudart, Host


class Gpu:
    """A pool on a GPU of `host`, in a process of its own as far as the GPU knows; its mirror is `region`."""

    def __init__(self, host: Host, region: Region):
        self.library = Cudart(host)
        self.region = DeviceRegion(CudaRuntime(self.library), 0, len(region.memory))
        self.pool = np.frombuffer(self.library.allocations[self.region.address], np.uint8, self.region.num_bytes)
        tensors = [torch.frombuffer(memory, dtype=torch.uint8) for memory in (self.pool.data, region.memory)]
        crossing = Crossing(*tensors)
        self.device = DevicePool(self.region, crossing.sums, crossing.copy_out, crossing.copy_in)

    def close(self) -> None:
        self.region.close()
        library = self.library
        assert not (library.allocations or library.opened or library.events or library.streams), "all was given back"


def copied_to_host(region: DeviceRegion, stream: int, offset: int, num_bytes: int) -> np.ndarray:
    """Return uint8 [num_bytes] of a region, from `offset` on. Raises CudaError."""
    found = np.empty(num_bytes, np.uint8)
    region.runtime.set_device(region.device)
    region.runtime.copy_to_host(found.ctypes.data, region.address + offset, num_bytes, stream)
    return found
