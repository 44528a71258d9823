"""A pool in GPU memory that another process can open: an allocation of its own, since a handle of torch's caching
allocator would open the whole segment with everything in it."""

import numpy as np

from kvtransfer.memory.cuda_runtime import CudaRuntime


class DeviceRegion:
    """`address`: of the first byte, on `device`. torch takes the region for an array (torch.as_tensor(region)) by way
    of the CUDA array interface, without a copy."""

    def __init__(self, runtime: CudaRuntime, device: int, num_bytes: int):
        """Zeroed. Raises ValueError for a size below 1, CudaError when there is no memory."""
        if num_bytes < 1:
            raise ValueError(f"a region of {num_bytes} bytes: at least 1")
        runtime.set_device(device)
        self.runtime, self.device, self.num_bytes = runtime, device, num_bytes
        self.address = runtime.allocate(num_bytes)

    @property
    def handle(self) -> bytes:
        return self.runtime.handle_of(self.address)

    @property
    def __cuda_array_interface__(self) -> dict:
        data = (self.address, False)  # may be written
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": data, "version": 3, "strides": None}

    def close(self) -> None:
        """Idempotent. Only after every dialogue has ended: freeing memory that a taker still reads is undefined."""
        address, self.address = self.address, 0
        if address:
            self.runtime.free(address)


class OpenRegions:
    """Allocations of other processes, each opened once: CUDA counts, and the last close unmaps."""

    def __init__(self, runtime: CudaRuntime):
        self._runtime = runtime
        self._open: dict[bytes, list[int]] = {}  # handle -> [address, users]

    def open(self, handle: bytes) -> int:
        """Its address here; to be given back by `close`. Raises CudaError."""
        entry = self._open.get(handle)
        if entry is None:
            entry = self._open[handle] = [self._runtime.open_handle(handle), 0]
        entry[1] += 1
        return entry[0]

    def close(self, handle: bytes) -> None:
        entry = self._open[handle]
        entry[1] -= 1
        if not entry[1]:
            del self._open[handle]
            self._runtime.close_handle(entry[0])


def copied_to_host(region: DeviceRegion, stream: int, offset: int, num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes] from `offset` on. Raises CudaError."""
    found = np.empty(num_bytes, np.uint8)
    region.runtime.set_device(region.device)
    region.runtime.copy_to_host(found.ctypes.data, region.address + offset, num_bytes, stream)
    return found
