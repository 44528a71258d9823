"""What an adapter adds to one linear layer: two small products, B (A x), of the kernels that the layer itself may have.

The layers of a model hold several modules in one kernel, their outputs turned and padded. An adapter's pairs are joined the
same way: the A of all modules one above the other, each B beside its own A's rows, zeros elsewhere.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.adapters.lora_folder import LoraFolder
from baton.engine.layers.linear import LinearKernel
from baton.engine.weights.forms import DenseWeight, Weight

MakeKernel = Callable[[Weight, Tensor | None, int, bool], LinearKernel]  # as of models.linears


class LowRank:
    """x [R, in] -> what is added to y [R, out], both in the compute dtype. Rows are as independent as its kernels make
    them."""

    def __init__(self, down: LinearKernel, up: LinearKernel):
        self.down, self.up = down, up

    def __call__(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))

    @property
    def num_bytes(self) -> int:
        return self.down.num_bytes + self.up.num_bytes


class LowRanks:
    """Reads the pairs of one adapter by the calls that read the modules of its base (models.linears.Linears)."""

    def __init__(self, folder: LoraFolder, make: MakeKernel, dtype: torch.dtype, device: torch.device):
        self._folder, self._make, self._dtype, self._device = folder, make, dtype, device

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
    ) -> LowRank | None:
        """Return what is added to the outputs of these modules; None: nothing. Arguments as of Linears.read, of a model
        that is not divided among ranks."""
        found = [self._folder.pair(module, size, in_features) for module, size in zip(modules, sizes, strict=True)]
        ranks = [0 if pair is None else len(pair[0]) for pair in found]
        if not any(ranks):
            return None
        down = torch.cat([pair[0] for pair in found if pair is not None])
        blocks, begin = [], 0
        for pair, size, rank, order in zip(found, sizes, ranks, orders or [None] * len(found), strict=True):
            block = torch.zeros(size, sum(ranks))
            if pair is not None:
                block[:, begin : begin + rank] = pair[1]
            block = block if order is None else block[order]
            blocks += [F.pad(part, (0, 0, 0, rows)) for part in block.chunk(parts)]
            begin += rank
        return LowRank(self._kernel(F.pad(down, (0, columns))), self._kernel(torch.cat(blocks)))

    def _kernel(self, values: Tensor) -> LinearKernel:
        return self._make(DenseWeight(values.to(self._device, self._dtype)), None, 1, False)
