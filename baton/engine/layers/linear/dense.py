"""`F.linear` on a weight of any form, expanded to the compute dtype; activations are rounded to fp8 if the form says
so.

Measured (torch 2.13, MKL and oneDNN, AVX-512, 1 to 16 threads, shapes 30 to 14,336): a row of `F.linear` has the same
bits whatever shares its batch once there are at least 2 rows in bf16 and fp16, and when the number of rows is a
multiple of 8 in fp32. A single row takes another path (a matrix-vector product that adds in another order). On
processors with AMX both libraries choose their kernels by the number of rows up to 256 and more, and MKL divides sums
among threads: rows are equal there only after `reproducible.fix_order_of_sums`.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.layers.linear.base import LinearKernel
from baton.engine.layers.linear.rounding import rounded_to_e4m3
from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight, Weight
from baton.engine.weights.leaves import combined

# Rows are padded to a multiple of this, by dtype.
ROW_MULTIPLE = {torch.float32: 8, torch.bfloat16: 2, torch.float16: 2}


class DenseLinear(LinearKernel):
    """Apply `F.linear` to padded rows, so that each row is computed in the same order, however many there are."""

    name = "dense"
    batch_invariant = True

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype, leaves: int = 1, partial: bool = False):
        """Expand weight [out_features, in_features] of any form, bias [out_features], to `dtype`, in which everything
        is computed, each leaf's sum included. Leaves are added in fp32."""
        self._order = None
        if leaves > 1 and isinstance(weight, IntWeight) and weight.order is not None:
            self._order, weight = weight.order, replace(weight, order=None)  # leaves are those of the stored order
        values = (weight.values if isinstance(weight, DenseWeight) else weight.dequantize()).to(dtype)
        # [leaves, out, inputs of a leaf]: a leaf's part is contiguous wherever it is.
        self.weight = (
            values.unsqueeze(0) if leaves == 1 else values.unflatten(1, (leaves, -1)).transpose(0, 1).contiguous()
        )
        self.bias, self._dtype_of_y = bias, torch.float32 if partial else dtype
        self.row_multiple = ROW_MULTIPLE[dtype]
        self._e4m3 = None  # (activations, inputs per block, scale) of a form with fp8 activations
        if isinstance(weight, Fp8Weight) and weight.activations != "none":
            self._e4m3 = (weight.activations, weight.block[1], weight.input_scale)
            self.scaled_by_row = weight.activations == "dynamic"

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        if self._e4m3 is not None:
            x = rounded_to_e4m3(x, *self._e4m3, largest)
        x = x if self._order is None else x[:, self._order]
        num_rows, missing = x.shape[0], -x.shape[0] % self.row_multiple
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        if len(self.weight) == 1:
            return F.linear(x, self.weight[0], self.bias)[:num_rows].to(self._dtype_of_y)
        parts = x.unflatten(1, (len(self.weight), -1)).transpose(0, 1).contiguous()
        y = combined([F.linear(part, leaf).float() for part, leaf in zip(parts, self.weight, strict=True)])
        return (y if self.bias is None else y + self.bias)[:num_rows].to(self._dtype_of_y)


class FastLinear(DenseLinear):
    """Apply `F.linear` directly; a single row may differ in its last bits from the same row in a batch."""

    name = "fast"
    batch_invariant = False

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype, leaves: int = 1, partial: bool = False):
        """Expand the weight as DenseLinear does, but with all inputs of a row as one leaf."""
        super().__init__(weight, bias, dtype, partial=partial)
        self.row_multiple = 1
