"""Apply adapters to the rows of a step by native kernels (native/layers/low_rank.cpp)."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import Array
from weakref import WeakKeyDictionary

import torch.nn.functional as F
from torch import Tensor

from baton.engine.adapters.adapters import Adapter
from baton.engine.adapters.low_rank import LINEARS, LowRank
from baton.engine.core.batch import AdapterRows

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_VECTOR = 16  # outputs
_RANKS, _INPUTS = 4, 32  # of a tile of A


class _Up(ctypes.Structure):
    """Mirror `Up` of native/layers/fused.h."""

    _fields_ = [("values", _POINTER), *((name, _INT) for name in ("first_out", "num_out", "first_rank", "rank"))]


class _LowRank(ctypes.Structure):
    """Mirror `LowRank` of native/layers/fused.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("down", "ups")),
        *((name, _INT) for name in ("num_ups", "rank", "num_in", "num_out")),
    ]


class _AdapterRows(ctypes.Structure):
    """Mirror `AdapterRows` of native/layers/fused.h."""

    _fields_ = [("rows", _POINTER), ("num_rows", _INT), ("layers", _POINTER)]


class NativeLowRank(LowRank):
    """Hold the pairs of one linear layer: A in tiles, B in vectors of outputs."""

    def __init__(self, down: Tensor, ups: Sequence[Tensor]):
        """Pack the pairs; the numbers of inputs and outputs are multiples of 16."""
        self._down, self._ups, structs = _in_tiles(down), [], []
        first_out = first_rank = 0
        for up in ups:
            num_out, rank = up.shape
            if rank:
                values = up.view(-1, _VECTOR, rank).transpose(1, 2).contiguous()
                self._ups.append(values)
                structs.append(_Up(values.data_ptr(), first_out, num_out, first_rank, rank))
            first_out, first_rank = first_out + num_out, first_rank + rank
        self._structs = (_Up * len(structs))(*structs)
        ups_at = ctypes.addressof(self._structs)
        self.struct = _LowRank(self._down.data_ptr(), ups_at, len(structs), *down.shape, first_out)

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for values in (self._down, *self._ups))


def _in_tiles(down: Tensor) -> Tensor:
    """Return A [rank, in] as the kernel reads it, with each tile of ranks contiguous."""
    padded = F.pad(down, (0, -down.shape[1] % _INPUTS, 0, -down.shape[0] % _RANKS))
    return padded.unflatten(1, (-1, _INPUTS)).unflatten(0, (-1, _RANKS)).transpose(1, 2).contiguous()


class NativeAdapters:
    """Hold the adapters of one model as structs."""

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[Adapter, Array] = WeakKeyDictionary()
        self._rows: dict[Adapter, array] = {}

    def rows(self, adapters: Sequence[AdapterRows]) -> Array:
        """Return the structs of a step, one for each adapter's rows. They are valid until the next call."""
        rows: dict[Adapter, array] = {}
        for begin, end, adapter in adapters:
            rows.setdefault(adapter, array("q")).extend(range(begin, end))
        structs = [_AdapterRows(own.buffer_info()[0], len(own), self._table(each)) for each, own in rows.items()]
        self._rows = rows  # the structs point at these
        return (_AdapterRows * len(structs))(*structs)

    def _table(self, adapter: Adapter) -> int:
        """Return the address of an adapter's pairs, [layers][LINEARS], valid as long as the adapter lives."""
        if (table := self._tables.get(adapter)) is None:
            pairs = [layer.get(name) for layer in adapter.layers for name in LINEARS]
            structs = [pair.struct if isinstance(pair, NativeLowRank) else _LowRank() for pair in pairs]
            table = self._tables[adapter] = (_LowRank * len(structs))(*structs)
        return ctypes.addressof(table)
