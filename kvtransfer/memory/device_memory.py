"""Allocate a pool in GPU memory that another process can open. It is an allocation of its own, since a handle from
torch's caching allocator would open a whole segment with everything in it."""

import numpy as np

from kvtransfer.memory.cuda_runtime import CudaRuntime

CANARY_BYTES = 1 << 20


class DeviceRegion:
    """Own GPU memory from `address` on `device`, followed by CANARY_BYTES of `canary`. torch.as_tensor(region) uses it
    without a copy, through the CUDA array interface."""

    def __init__(self, runtime: CudaRuntime, device: int, num_bytes: int):
        """Allocate zeroed memory. Raises ValueError for a size below 1, CudaError when there is no memory."""
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
        """Free the memory. Idempotent. Every dialogue must have ended: freeing memory that a taker still reads is
        undefined."""
        address, self.address = self.address, 0
        if address:
            self.runtime.free(address)


def canary() -> np.ndarray:
    """Return the bytes that follow every region, which a taker in another process must find there."""
    return np.random.default_rng(0).integers(0, 256, CANARY_BYTES, np.uint8)


def wrong_canary_bytes(runtime: CudaRuntime, device: int, address: int) -> int:
    """Copy the canary at `address`, of any GPU, to `device` in the way KV is copied; return how many bytes arrive
    wrong. Waits for the GPU. Raises CudaError."""
    wanted = canary()
    runtime.set_device(device)
    stream, scratch = runtime.make_stream(), runtime.allocate(CANARY_BYTES)
    try:
        found = ~wanted  # so that every byte is wrong until it is copied
        runtime.copy_from_host(scratch, found.ctypes.data, CANARY_BYTES, stream)
        runtime.copy(scratch, address, CANARY_BYTES, (CANARY_BYTES, CANARY_BYTES), 1, stream)
        runtime.copy_to_host(found.ctypes.data, scratch, CANARY_BYTES, stream)
    finally:
        runtime.free(scratch)
        runtime.destroy_stream(stream)
    return int(np.count_nonzero(found != wanted))
