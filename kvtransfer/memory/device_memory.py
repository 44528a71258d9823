"""A pool in GPU memory that another process can open: an allocation of its own, since a handle of torch's caching
allocator would open the whole segment with everything in it."""

import numpy as np

from kvtransfer.memory.cuda_runtime import CudaRuntime

CANARY_BYTES = 1 << 20


class DeviceRegion:
    """`address`: of the first byte, on `device`; behind the last one lie CANARY_BYTES of `canary`. torch takes the
    region for an array (torch.as_tensor(region)) by way of the CUDA array interface, without a copy."""

    def __init__(self, runtime: CudaRuntime, device: int, num_bytes: int):
        """Zeroed. Raises ValueError for a size below 1, CudaError when there is no memory."""
        if num_bytes < 1:
            raise ValueError(f"a region of {num_bytes} bytes: at least 1")
        runtime.set_device(device)
        self.runtime, self.device, self.num_bytes = runtime, device, num_bytes
        self.address = runtime.allocate(num_bytes + CANARY_BYTES)
        pattern, stream = canary(), runtime.make_stream()
        runtime.copy_from_host(self.address + num_bytes, pattern.ctypes.data, CANARY_BYTES, stream)
        runtime.destroy_stream(stream)

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


def canary() -> np.ndarray:
    """Return the bytes that lie behind every region: what a taker of another process has to find there."""
    return np.random.default_rng(0).integers(0, 256, CANARY_BYTES, np.uint8)


def wrong_canary_bytes(runtime: CudaRuntime, device: int, address: int) -> int:
    """Copy the pattern at `address`, of any GPU, to `device` as KV is copied, and count the bytes that arrive wrong.
    Waits for the GPU. Raises CudaError."""
    wanted = canary()
    runtime.set_device(device)
    stream, scratch = runtime.make_stream(), runtime.allocate(CANARY_BYTES)
    try:
        found = ~wanted  # nothing that lies there already is right
        runtime.copy_from_host(scratch, found.ctypes.data, CANARY_BYTES, stream)
        runtime.copy(scratch, address, CANARY_BYTES, (CANARY_BYTES, CANARY_BYTES), 1, stream)
        runtime.copy_to_host(found.ctypes.data, scratch, CANARY_BYTES, stream)
    finally:
        runtime.free(scratch)
        runtime.destroy_stream(stream)
    return int(np.count_nonzero(found != wanted))
