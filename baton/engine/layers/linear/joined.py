"""Linear kernels made of others: projections that share their input but cannot be one matrix (other bits, groups or
orders), and those with outputs scaled by numbers of the model."""

import torch
from torch import Tensor

from baton.engine.layers.linear.base import LinearKernel


class JoinedLinear(LinearKernel):
    """Put the outputs of several kernels side by side; as exact as the least exact of them."""

    def __init__(self, parts: list[LinearKernel]):
        """Join at least one kernel, all with the same inputs."""
        self._parts = parts
        self.name = "+".join(dict.fromkeys(part.name for part in parts))
        self.batch_invariant = all(part.batch_invariant for part in parts)
        self.row_multiple = max(part.row_multiple for part in parts)
        self.scaled_by_row = any(part.scaled_by_row for part in parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        return torch.cat([part(x, largest) for part in self._parts], dim=1)


class ScaledLinear(LinearKernel):
    """Multiply each output of a kernel by a number."""

    def __init__(self, kernel: LinearKernel, scale: Tensor):
        """Scale by `scale` [out_features], in the compute dtype."""
        self._kernel, self._scale = kernel, scale
        self.name, self.batch_invariant = kernel.name, kernel.batch_invariant
        self.row_multiple, self.scaled_by_row = kernel.row_multiple, kernel.scaled_by_row

    @property
    def num_bytes(self) -> int:
        return self._kernel.num_bytes

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        y = self._kernel(x, largest)
        if self._scale.device != y.device:  # a kernel does not say on which device it computes
            self._scale = self._scale.to(y.device)
        return y.mul_(self._scale)
