"""The addition of an adapter to one linear layer: two small products, B (A x).

A model's layers hold several modules in one kernel, with outputs reordered and padded. An adapter's pairs are joined
the same way: the A of all modules one above the other, each B for the rows of its own A.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.adapters.lora_folder import LoraFolder
from baton.engine.layers.linear import LinearKernel
from baton.engine.weights.forms import DenseWeight, Weight

# Linears that may have pairs, numbered as in `Adapted` of native/layers/fused.h.
LINEARS = ("qkv", "output", "gate_up", "down")
MakeKernel = Callable[[Weight, Tensor | None, int, bool], LinearKernel]  # as in models.linears


class LowRank(ABC):
    """Hold one low-rank pair in the form that the model's layers apply."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Return the bytes of both matrices."""


MakeLowRank = Callable[[Tensor, Sequence[Tensor]], LowRank]  # A [rank, in], the B of each module [out, its own ranks]


class ComposedLowRank(LowRank):
    """Compute x [R, in] -> the addition to y [R, out], both in the compute dtype, by kernels as the layer itself may
    have. Rows are as independent as these make them."""

    def __init__(self, make: MakeKernel, down: Tensor, ups: Sequence[Tensor]):
        self._down, self._up = (make(DenseWeight(values), None, 1, False) for values in (down, torch.block_diag(*ups)))

    def __call__(self, x: Tensor) -> Tensor:
        return self._up(self._down(x))

    @property
    def num_bytes(self) -> int:
        return self._down.num_bytes + self._up.num_bytes


class LowRanks:
    """Read the pairs of one adapter by the calls that read the modules of its base (models.linears.Linears)."""

    def __init__(
        self,
        folder: LoraFolder,
        make: MakeLowRank,
        dtype: torch.dtype,
        device: torch.device,
        range_of: Callable[[int], range] = range,
    ):
        """Read pairs for this process, which has the part `range_of(n)` of n outputs if ranks share them."""
        self._folder, self._make, self._dtype, self._device, self._range_of = folder, make, dtype, device, range_of

    def read(
        self,
        modules: Sequence[str],
        sizes: Sequence[int],
        in_features: int,
        bias: bool,
        rows: int = 0,
        columns: int = 0,
        orders: Sequence[Tensor | None] = (),
        parts: int = 1,
        row_parallel: bool = False,
        column_parallel: bool = False,
        num_outputs: int = 0,
    ) -> LowRank | None:
        """Return the addition to the outputs of these modules; None if nothing is added. Arguments as for Linears.read.
        Of inputs divided among ranks it takes all."""
        found = [self._folder.pair(module, size, in_features) for module, size in zip(modules, sizes, strict=True)]
        if not any(found):
            return None
        down = torch.cat([pair[0] for pair in found if pair is not None])
        ups = []
        for pair, size, order in zip(found, sizes, orders or [None] * len(found), strict=True):
            up = torch.zeros(size, 0) if pair is None else pair[1]
            up = up if order is None else up[order]
            padded = [F.pad(part, (0, 0, 0, rows)) for part in up.chunk(parts)]
            ups.append(torch.cat([part[self._range_of(len(part))] for part in padded] if column_parallel else padded))
        return self._make(self._held(F.pad(down, (0, columns))), [self._held(up) for up in ups])

    def _held(self, values: Tensor) -> Tensor:
        return values.to(self._device, self._dtype)
