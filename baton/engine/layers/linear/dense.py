"""`F.linear` on a weight of any form, expanded to the compute dtype; activations are rounded to fp8 where the form says so.

Measured (torch 2.13, MKL and oneDNN, AVX-512, 1 to 16 threads, shapes 30 to 14,336): a row of `F.linear` has the same
bits whatever shares its batch once there are at least 2 rows in bf16 and fp16, and when the number of rows is a
multiple of 8 in fp32. One row alone takes another path (a matrix-vector product that adds in another order).
Where the processor has AMX both libraries choose their kernels by the number of rows up to 256 and more, and MKL divides
sums among threads: there rows are equal only behind `reproducible.fix_order_of_sums`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.layers.linear.base import LinearKernel
from baton.engine.layers.linear.rounding import rounded_to_e4m3
from baton.engine.weights.forms import DenseWeight, Fp8Weight, Weight

# Rows are padded to a multiple of this, by dtype.
ROW_MULTIPLE = {torch.float32: 8, torch.bfloat16: 2, torch.float16: 2}


class DenseLinear(LinearKernel):
    """`F.linear` on padded rows: every row is computed in the same order, however many there are."""

    name = "dense"
    batch_invariant = True

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype):
        """weight [out_features, in_features] in any form, bias [out_features]; dtype: what is computed in."""
        values = weight.values if isinstance(weight, DenseWeight) else weight.dequantize()
        self.weight, self.bias = values.to(dtype), bias
        self.row_multiple = ROW_MULTIPLE[dtype]
        self._e4m3 = None  # activations, inputs of a block, scale
        if isinstance(weight, Fp8Weight) and weight.activations != "none":
            self._e4m3 = (weight.activations, weight.block[1], weight.input_scale)

    def __call__(self, x: Tensor) -> Tensor:
        if self._e4m3 is not None:
            x = rounded_to_e4m3(x, *self._e4m3)
        missing = -x.shape[0] % self.row_multiple
        if missing == 0:
            return F.linear(x, self.weight, self.bias)
        return F.linear(F.pad(x, (0, 0, 0, missing)), self.weight, self.bias)[: x.shape[0]]


class FastLinear(DenseLinear):
    """`F.linear` as it is: one row may differ in its last bits from the same row in a batch."""

    name = "fast"
    batch_invariant = False

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype):
        super().__init__(weight, bias, dtype)
        self.row_multiple = 1
