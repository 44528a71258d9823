"""Linear layers. A `Linear` owns no arithmetic: a kernel applies its weight, and says whether rows are independent.

Measured (torch 2.13, MKL and oneDNN, AVX-512, 1 to 16 threads, shapes 30 to 14,336): a row of `F.linear` has the same
bits whatever shares its batch once there are at least 2 rows in bf16 and fp16, and when the number of rows is a
multiple of 8 in fp32. One row alone takes another path (a matrix-vector product that adds in another order).
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows are padded to a multiple of this, by dtype.
ROW_MULTIPLE = {torch.float32: 8, torch.bfloat16: 2, torch.float16: 2}


class LinearKernel(ABC):
    """Parameters of one weight, and x -> y."""

    name: str
    batch_invariant: bool
    row_multiple: int  # rows that the caller pads to, once per step, so that no kernel has to

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> y [T, out_features], both in the compute dtype."""


class DenseLinear(LinearKernel):
    """`F.linear` on padded rows: every row is computed in the same order, however many there are."""

    name = "dense"
    batch_invariant = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        """weight [out_features, in_features], bias [out_features], in the compute dtype."""
        self.weight, self.bias = weight, bias
        self.row_multiple = ROW_MULTIPLE[weight.dtype]

    def __call__(self, x: Tensor) -> Tensor:
        missing = -x.shape[0] % self.row_multiple
        if missing == 0:
            return F.linear(x, self.weight, self.bias)
        return F.linear(F.pad(x, (0, 0, 0, missing)), self.weight, self.bias)[: x.shape[0]]


class FastLinear(DenseLinear):
    """`F.linear` as it is: one row may differ in its last bits from the same row in a batch."""

    name = "fast"
    batch_invariant = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__(weight, bias)
        self.row_multiple = 1


KERNELS = {kernel.name: kernel for kernel in (DenseLinear, FastLinear)}


def choose(name: str, batch_invariant: bool) -> tuple[type[DenseLinear], dict[str, str]]:
    """The kernel class for `name` ("auto" picks), and why each of the others was passed over.

    Raises ValueError where the kernel asked for does not exist or cannot be exact in exact mode.
    """
    if name not in ("auto", *KERNELS):
        raise ValueError(f"linear kernel {name!r}: one of auto, {', '.join(KERNELS)}")
    reasons = {}
    if batch_invariant:
        reasons["fast"] = "rows depend on the size of their batch, refused in batch-invariant mode"
    if name in reasons:
        raise ValueError(f"linear kernel {name!r}: {reasons[name]}")
    chosen = name if name != "auto" else next(known for known in ("fast", "dense") if known not in reasons)
    for other in KERNELS:
        if other != chosen:
            reasons.setdefault(other, f"{chosen} was " + ("chosen" if name == "auto" else "asked for"))
    return KERNELS[chosen], reasons
