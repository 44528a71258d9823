"""The memory that steps take beside weights and pool, as measured: the most of any step so far.

On a CPU it is the native kernels' scratch, which their threads keep as long as they live, and what was allocated
between a step's begin and the looks that are taken within it, by malloc's own books: when the last layer has been left
and when the logits are there. What torch's layers (without the native kernels) free before their layer ends is not
seen. Only steps larger than those before are looked at: malloc counts its free pieces for every look, 17 ms with
100,000 of them. On a GPU it is what torch's allocator holds beyond what it held before the first step: tensors of
steps, and the buffers of graphs.
"""

import ctypes
from functools import cache

import torch

from baton import system
from baton.engine import native

_LARGER = 1.2  # so a step of 512 tokens is reached in 35 looks at the most


class HeapActivations:
    """Belongs to the loop's thread; `num_bytes` to any."""

    def __init__(self) -> None:
        self._transient = 0
        self._heap, self._scratch = 0, 0  # when the step began
        self._num_rows, self._num_logits = 0, 0  # of the largest steps that were looked at
        self._is_looking = False

    def begin(self, num_rows: int, num_logits: int) -> None:
        """Begin a step of `num_rows` tokens and `num_logits` rows of logits."""
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
    """Made when the weights are loaded."""

    def __init__(self, device: torch.device):
        self._device = device
        self._at_rest = torch.cuda.memory_allocated(device)

    def begin(self, num_rows: int, num_logits: int) -> None:
        """The allocator keeps its own books."""

    def look(self) -> None:
        """As for `begin`."""

    @property
    def num_bytes(self) -> int:
        return max(0, torch.cuda.memory_reserved(self._device) - self._at_rest)


def activations_on(device: torch.device) -> HeapActivations | DeviceActivations:
    return HeapActivations() if device.type == "cpu" else DeviceActivations(device)


def _heap_bytes() -> int:
    """Allocated by malloc and in use."""
    return system.heap_bytes().get("used", 0)


@cache
def _scratch_function():
    library = native.library()
    return None if library is None else library.function("baton_scratch_bytes", restype=ctypes.c_int64)


def _scratch_bytes() -> int:
    return 0 if (function := _scratch_function()) is None else function()
