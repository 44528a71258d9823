"""Apply adapters to the rows of a step on a GPU by Triton kernels (kernels/low_rank.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from baton.engine.adapters.adapters import Adapter
from baton.engine.adapters.low_rank import LINEARS, LowRank
from baton.engine.core.batch import AdapterRows
from baton.engine.core.device import sent
from baton.engine.kernels import low_rank as kernels

# A row is always multiplied in one tile shape: of 64 rows, since a warp group multiplies no fewer.
BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R = 64, 64, 64, 16


class GpuLowRank(LowRank):
    """Hold the pairs of one linear layer, with A and B of all its modules in one matrix each."""

    def __init__(self, down: Tensor, ups: Sequence[Tensor]):
        """Join the pairs, which are on the device and in the compute dtype."""
        missing = -down.shape[0] % BLOCK_R
        self.down = F.pad(down, (0, 0, 0, missing)).contiguous()
        self.up = F.pad(torch.block_diag(*ups), (0, missing)).contiguous()

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of inputs and outputs."""
        return self.down.shape[1], self.up.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """Hold the adapters of one step."""

    tiles: Tensor  # int64 [N, 3], as the kernels read them
    tables: tuple[Tensor, ...]  # kept alive, since the tiles point at them
    largest_rank: int

    def add(self, layer: int, name: str, x: Tensor, y: Tensor) -> None:
        """Add to y [T, out], contiguous, what adapters make of x [T, in] in the linear `name` of a layer."""
        place, num_tiles = layer * len(LINEARS) + LINEARS.index(name), len(self.tiles)
        x = x if x.stride(1) == 1 else x.contiguous()
        inner = x.new_empty(x.shape[0], self.largest_rank)
        kernels.shrink[(num_tiles, self.largest_rank // BLOCK_R)](
            x, self.tiles, inner, place, x.shape[1], x.stride(0), inner.stride(0),
            BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R, BLOCK_K=BLOCK_K, enable_fp_fusion=False,
        )  # fmt: skip
        kernels.expand[(num_tiles, triton.cdiv(y.shape[1], BLOCK_N))](
            inner, self.tiles, y, place, y.shape[1], inner.stride(0), y.stride(0),
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_R=BLOCK_R, enable_fp_fusion=False,
        )  # fmt: skip


class GpuAdapters:
    """Hold the adapters of one model as tables of addresses on its device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._tables: WeakKeyDictionary[Adapter, Tensor] = WeakKeyDictionary()

    def plan(self, adapters: Sequence[AdapterRows]) -> StepAdapters | None:
        """Return the adapters of a step, divided into tiles of rows; None if none adds to a layer here. Nothing waits
        for the device."""
        tables = {each: self._table(each) for each in dict.fromkeys(rows.adapter for rows in adapters)}
        largest = max((pair.rank for each in tables for layer in each.layers for pair in layer.values()), default=0)
        if not largest:
            return None
        tiles = [
            (tables[adapter].data_ptr(), first, min(first + BLOCK_M, end))
            for begin, end, adapter in adapters
            for first in range(begin, end, BLOCK_M)
        ]
        return StepAdapters(self._sent(tiles), tuple(tables.values()), largest)

    def warm_up(self, adapter: Adapter, dtype: torch.dtype) -> None:
        """Compile the kernels that an adapter needs, before requests come. `dtype`: of rows."""
        with torch.inference_mode():
            plan = self.plan([AdapterRows(0, 1, adapter)])
            for index, layer in enumerate(adapter.layers):
                for name, pair in layer.items():
                    assert plan is not None and isinstance(pair, GpuLowRank)
                    x, y = (torch.zeros(1, size, dtype=dtype, device=self._device) for size in pair.shape)
                    plan.add(index, name, x, y)

    def _table(self, adapter: Adapter) -> Tensor:
        """Return the addresses of an adapter's pairs, int64 [layers * LINEARS, 3]."""
        if (table := self._tables.get(adapter)) is None:
            pairs = [layer.get(name) for layer in adapter.layers for name in LINEARS]
            rows = [
                (pair.down.data_ptr(), pair.up.data_ptr(), pair.rank) if isinstance(pair, GpuLowRank) else (0, 0, 0)
                for pair in pairs
            ]
            table = self._tables[adapter] = self._sent(rows)
        return table

    def _sent(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        return sent(torch.tensor(rows, dtype=torch.int64, device="cpu"), self._device)
