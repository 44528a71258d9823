"""Sum a GPU pool's words on the device, and copy blocks to and from its mirror in host memory. All this runs beside the
engine's steps, on a stream of its own."""

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from baton.engine.kv.pool import KVPool
from kvtransfer.memory.device_memory import DeviceRegion
from kvtransfer.memory.pools import BytePlaces, DevicePool

STAGING_BYTES = 16 << 20  # of pinned memory; drivers copy pageable memory at only 3 to 6 GB/s
_ELEMENTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def device_pool(pool: KVPool, region: DeviceRegion, mirror: memoryview) -> DevicePool:
    """Return the pool with its functions. `region`: the pool's memory; `mirror`: writable host memory of the pool's
    size."""
    crossing = Crossing(pool.whole, torch.frombuffer(mirror, dtype=torch.uint8, count=pool.whole.numel()))
    return DevicePool(region, crossing.sums, crossing.copy_out, crossing.copy_in)


class Crossing:
    """Implement the functions of kvtransfer.memory.pools.DevicePool. Thread-safe. No step may write the blocks
    meanwhile."""

    def __init__(self, pool: Tensor, mirror: Tensor):
        """Copy between `pool` and `mirror`, both uint8, contiguous and of one size."""
        self._device, self._host = pool.view(-1), mirror.view(-1)
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        self._running = threading.Lock()
        self._staged = torch.empty(0, dtype=torch.uint8)
        self._tables: dict[tuple[int, int], Tensor] = {}  # weights on the device, by length and first weight

    def copy_out(self, places: BytePlaces, ids: np.ndarray) -> None:
        def move(device: Tensor, host: Tensor, some: np.ndarray, staged: Tensor) -> None:
            staged.copy_(device[self._there(some)])
            host.index_copy_(0, torch.from_numpy(some), staged)

        self._copy(places, ids, move)

    def copy_in(self, places: BytePlaces, ids: np.ndarray) -> None:
        def move(device: Tensor, host: Tensor, some: np.ndarray, staged: Tensor) -> None:
            torch.index_select(host, 0, torch.from_numpy(some), out=staged)
            device.index_copy_(0, self._there(some), staged.to(device.device))

        self._copy(places, ids, move)

    @torch.inference_mode()
    def sums(
        self, places: BytePlaces, word_bytes: int, ids: np.ndarray, table: np.ndarray, starts: np.ndarray
    ) -> np.ndarray:  # fmt: skip
        """Return weighted sums uint64 [block, unit, row, head]. torch has int64 only, which wraps like uint64."""
        with self._running, self._on_device(), torch.cuda.stream(self._stream):
            words = _elements(self._device, places, word_bytes)[self._there(ids)].view(_ELEMENTS[word_bytes])
            if word_bytes < 8:
                words = words.to(torch.int64) & ((1 << 8 * word_bytes) - 1)
            factors = self._weights(table)[self._there(starts[:, None] + np.arange(words.shape[-1]))]
            parts = (words * factors[:, None, None, None]).sum(-1).permute(0, 3, 1, 2).contiguous()
            return parts.cpu().numpy().view(np.uint64)  # waits for the stream

    @torch.inference_mode()
    def _copy(self, places: BytePlaces, ids: np.ndarray, move: Callable) -> None:
        """Call `move` (elements on the device, elements on the host, block ids, pinned memory for these blocks) for as
        many blocks at a time as fit in pinned memory."""
        device, host = (_elements(each, places) for each in (self._device, self._host))
        block_bytes = host[0].numel() * host.element_size()
        at_once = max(1, STAGING_BYTES // block_bytes)
        # One call at a time: of two copies, the one that began later could end first.
        with self._running, self._on_device(), torch.cuda.stream(self._stream):
            for begin in range(0, len(ids), at_once):
                some = ids[begin : begin + at_once]
                staged = self._staging(len(some) * block_bytes).view(host.dtype).view(len(some), *host.shape[1:])
                move(device, host, some, staged)
                if self._stream is not None:
                    self._stream.synchronize()

    def _on_device(self) -> AbstractContextManager:
        """Set the thread's current device. A thread that leaves a stream of another device would make a context on the
        first GPU."""
        return nullcontext() if self._stream is None else torch.cuda.device(self._device.device)

    def _staging(self, num_bytes: int) -> Tensor:
        if num_bytes > len(self._staged):
            size = max(num_bytes, STAGING_BYTES)
            self._staged = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
        return self._staged[:num_bytes]

    def _weights(self, table: np.ndarray) -> Tensor:
        key = len(table), int(table[0])
        if key not in self._tables:
            self._tables[key] = self._there(table)
        return self._tables[key]

    def _there(self, array: np.ndarray) -> Tensor:
        return torch.tensor(array.view(np.int64), device=self._device.device)


def _elements(flat: Tensor, places: BytePlaces, at_most: int = 8) -> Tensor:
    """Return the pool as [block, ..., elements], with elements as wide as all strides allow."""
    size = math.gcd(at_most, places.offset, places.counts[-1], *places.strides)
    counts = (len(flat) // places.strides[0], *places.counts[:-1], places.counts[-1] // size)
    strides = (*(stride // size for stride in places.strides), 1)
    return flat[: len(flat) // size * size].view(_ELEMENTS[size]).as_strided(counts, strides, places.offset // size)
