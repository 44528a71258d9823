"""Measure the peak memory of steps beside weights and pool.

On a CPU that is the native kernels' scratch memory, which their threads keep, and what malloc reports as allocated
since the step began, looked at after the last layer and after the logits. Memory that torch's layers (without native
kernels) free before their layer ends is missed. Only steps larger than all before are looked at: for every look malloc
counts its free pieces, 17 ms for 100,000 of them. On a GPU it is what torch's allocator holds beyond what it held
before the first step: tensors of steps and buffers of graphs.
"""

import ctypes
from functools import cache

import torch

from baton import system
from baton.engine import native

_LARGER = 1.2  # so steps of 512 tokens are reached in at most 35 looks


class HeapActivations:
    """Measures on a CPU. Belongs to the loop's thread; any thread may read `num_bytes`."""

    def __init__(self) -> None:
        self._transient = 0
        self._heap, self._scratch = 0, 0  # when the step began
        self._num_rows, self._num_logits = 0, 0  # of the largest steps measured
        self._is_looking = False

    def begin(self, num_rows: int, num_logits: int) -> None:
        """Note the begin of a step with `num_rows` tokens and `num_logits` rows of logits."""
        self._is_looking = num_rows > _LARGER * self._num_rows or num_logits > _LARGER * self._num_logits
        if self._is_looking:
            self._num_rows, self._num_logits = max(num_rows, self._num_rows), max(num_logits, self._num_logits)
            self._heap, self._scratch = _heap_bytes(), _scratch_bytes()

    def look(self) -> None:
        if not self._is_looking:
            return
        grown = _heap_bytes() - self._heap - (_scratch_bytes() - self._scratch)
        self._transient = max(self._transient, grown)

    @property
    def num_bytes(self) -> int:
        return self._transient + _scratch_bytes()


class DeviceActivations:
    """Measures on a GPU, relative to the memory at its making, when the weights are loaded."""

    def __init__(self, device: torch.device):
        self._device = device
        self._at_rest = torch.cuda.memory_allocated(device)

    def begin(self, num_rows: int, num_logits: int) -> None:
        """Do nothing: the allocator keeps count."""

    def look(self) -> None:
        """Do nothing: the allocator keeps count."""

    @property
    def num_bytes(self) -> int:
        return max(0, torch.cuda.memory_reserved(self._device) - self._at_rest)


def activations_on(device: torch.device) -> HeapActivations | DeviceActivations:
    return HeapActivations() if device.type == "cpu" else DeviceActivations(device)


def _heap_bytes() -> int:
    """Return the bytes that malloc has allocated and not freed."""
    return system.heap_bytes().get("used", 0)


@cache
def _scratch_function():
    library = native.library()
    return None if library is None else library.function("baton_scratch_bytes", restype=ctypes.c_int64)


def _scratch_bytes() -> int:
    return 0 if (function := _scratch_function()) is None else function()
