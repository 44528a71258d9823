"""What an adapter adds to one linear layer: two small products, B (A x).

The layers of a model hold several modules in one kernel, their outputs turned and padded. An adapter's pairs are joined
the same way: the A of all modules one above the other, each B for its own A's rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.adapters.lora_folder import LoraFolder
from baton.engine.layers.linear import LinearKernel
from baton.engine.weights.forms import DenseWeight, Weight

# Of a layer that may have pairs, as `Adapted` of native/layers/fused.h numbers them.
LINEARS = ("qkv", "output", "gate_up", "down")
MakeKernel = Callable[[Weight, Tensor | None, int, bool], LinearKernel]  # as of models.linears


class LowRank(ABC):
    """What the layers of a model apply in the way that they are run."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Of both matrices."""


MakeLowRank = Callable[[Tensor, Sequence[Tensor]], LowRank]  # A [rank, in], the B of each module [out, its own ranks]


class ComposedLowRank(LowRank):
    """x [R, in] -> what is added to y [R, out], both in the compute dtype, by the kernels that the layer itself may
    have. Rows are as independent as these make them."""

    def __init__(self, make: MakeKernel, down: Tensor, ups: Sequence[Tensor]):
        self._down, self._up = (make(DenseWeight(values), None, 1, False) for values in (down, torch.block_diag(*ups)))

    def __call__(self, x: Tensor) -> Tensor:
        return self._up(self._down(x))

    @property
    def num_bytes(self) -> int:
        return self._down.num_bytes + self._up.num_bytes


class LowRanks:
    """Reads the pairs of one adapter by the calls that read the modules of its base (models.linears.Linears)."""

    def __init__(
        self, folder: LoraFolder, make: MakeLowRank, dtype: torch.dtype, device: torch.device,
        range_of: Callable[[int], range] = range,
    ):  # fmt: skip
        """`range_of`: which of so many outputs this process has, where ranks share them."""
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
        """Return what is added to the outputs of these modules; None: nothing. Arguments as of Linears.read; of inputs
        that ranks share it takes all."""
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
