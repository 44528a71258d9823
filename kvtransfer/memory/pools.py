"""Give transports a pool on a GPU. Its host memory is a mirror: the same blocks at the same offsets, copied only when
they cross to or from another worker.

    transports    source                                     taker
    of the host   device ─ refresh ─► mirror ─ digest ─►     mirror ─ digest ─ flush ─► device
    of the GPU    device ─ digest ─►                         device (copied by the GPU or the network) ─ digest

The source announces its watermark after the step that wrote the KV, so everything copied or digested here is written.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvtransfer.layout import KVLayout
from kvtransfer.memory.blocks import BlockMemory, MemoryKernels
from kvtransfer.memory.device_memory import DeviceRegion


class BytePlaces(NamedTuple):
    """Locate the bytes of a view [block, ..., bytes] in a pool."""

    offset: int  # of the first byte of block 0
    counts: tuple[int, ...]  # of all axes but blocks; the last axis is contiguous bytes
    strides: tuple[int, ...]  # bytes, of all axes but the last


# (places of [block, row, head, unit, bytes], bytes of a word, block ids, weights, where in them each block begins)
# -> uint64 [block, unit, row, head], as MemoryKernels.word_sums.
DeviceSums = Callable[[BytePlaces, int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
Copy = Callable[[BytePlaces, np.ndarray], None]  # (places, block ids)


class DevicePool(NamedTuple):
    """Describe a pool on a GPU, with the worker's functions on it. They are called in threads, and return when their
    work on the GPU is done."""

    region: DeviceRegion
    sums: DeviceSums
    copy_out: Copy  # device -> mirror
    copy_in: Copy  # mirror -> device


class _Mirrored(BlockMemory):
    waits = True

    def __init__(self, memory, layout: KVLayout, device: DevicePool, kernels: MemoryKernels | None = None):
        super().__init__(memory, layout, kernels)
        self.device = device

    def places(self, view: np.ndarray) -> BytePlaces:
        """Return the places of a view [block, ..., bytes] whose last axis has no gaps."""
        offset = view.ctypes.data - self.blocks.ctypes.data
        return BytePlaces(offset, (*view.shape[1:-1], view.shape[-1] * view.itemsize), view.strides[:-1])


class Mirror(_Mirrored):
    """The host memory that mirrors a pool on a GPU."""

    def refresh(self, view: np.ndarray, ids: np.ndarray) -> None:
        """Copy blocks `ids`, int64 [n], of `view` [block, ...] from the device to the mirror."""
        self.device.copy_out(self.places(view), ids)

    def flush(self, view: np.ndarray, ids: np.ndarray) -> None:
        """Copy blocks `ids`, int64 [n], of `view` [block, ...] from the mirror to the device."""
        self.device.copy_in(self.places(view), ids)


class OnDevice(_Mirrored):
    """The pool on the GPU itself. Views of `blocks`, its mirror, give the offsets of bytes; they hold the bytes only
    after `expose`."""

    def word_sums(
        self, words: np.ndarray, ids: np.ndarray, table: np.ndarray, starts: np.ndarray, to: None, to_ids: None
    ) -> np.ndarray:  # fmt: skip
        """Sum words [block, row, head, unit, word] on the device: uint64 [len(ids), unit, row, head], as
        MemoryKernels.word_sums without a target."""
        return self.device.sums(self.places(words), words.itemsize, ids, table, starts)

    def expose(self, view: np.ndarray, ids: np.ndarray) -> None:
        """Copy blocks `ids`, int64 [n], of `view` [block, ...] from the device to the mirror."""
        self.device.copy_out(self.places(view), ids)
