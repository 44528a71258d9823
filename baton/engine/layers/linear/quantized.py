"""Int8 weights times int8 activations by torch's own integer products (FBGEMM), for machines without native kernels.

The sums are exact, so the bits are those of the native kernels. FBGEMM multiplies unsigned activations by signed
weights, and below VNNI it adds two such products in 16 bits: 2 * 127 * 128 fits, 2 * 255 * 128 does not. So a row is
passed twice, its positive values and its negative ones, and the sums are subtracted. FBGEMM returns sums as fp32, which
holds integers up to 2^24, so longer inputs are cut into pieces.
"""

import warnings

import torch
from torch import Tensor

from baton.engine.layers.linear.base import LinearKernel
from baton.engine.weights.forms import IntWeight, Weight
from baton.engine.weights.leaves import combined

PIECE = 1024  # inputs: 1024 * 127 * 128 < 2^24
TINY = 1e-30  # rows with no larger magnitude count as zero, since 127 / largest would overflow
ENGINE = "fbgemm"


class QuantizedLinear(LinearKernel):
    """Apply one weight of int8 rows, packed by torch."""

    name = ENGINE
    batch_invariant = True
    row_multiple = 1

    scaled_by_row = True

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype, leaves: int = 1, partial: bool = False):
        """Pack a weight that `unfit` accepts, with bias [out_features]; dtype of x and y."""
        assert isinstance(weight, IntWeight)
        self._num_bytes = weight.values.nbytes + weight.scales.nbytes + (0 if bias is None else bias.nbytes)
        self._scales, self._bias = weight.scales.flatten(), None if bias is None else bias.float()
        self._dtype_of_y = torch.float32 if partial else dtype
        self._leaves = [
            [_packed(piece) for piece in leaf.split(PIECE, dim=1)] for leaf in weight.values.chunk(leaves, dim=1)
        ]

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        x = x.float()
        largest = x.abs().amax(dim=1, keepdim=True) if largest is None else largest.unsqueeze(1)
        integers = torch.round(x * torch.where(largest <= TINY, 0.0, 127 / largest))
        both = torch.cat([integers.clamp(min=0), -integers.clamp(max=0)])
        parts = both.chunk(len(self._leaves), dim=1)
        sums = [_sum(part, pieces) for part, pieces in zip(parts, self._leaves, strict=True)]
        y = combined([sum_.mul_(largest / 127).mul_(self._scales) for sum_ in sums])
        return (y if self._bias is None else y + self._bias).to(self._dtype_of_y)


def unfit(weight: Weight) -> str:
    """Return why torch has no integer product for this weight; "" if it has one."""
    if ENGINE not in torch.backends.quantized.supported_engines:
        return f"this torch was built without {ENGINE}"
    if not isinstance(weight, IntWeight) or (weight.bits, weight.group) != (8, weight.shape[1]):
        return "multiplies int8 rows alone"
    if weight.activations != "dynamic":
        return "multiplies int8 activations alone"
    if weight.offsets is not None or weight.order is not None or weight.outliers is not None:
        return "takes no offsets, orders of inputs or outliers"
    return ""


def _sum(both: Tensor, pieces: list) -> Tensor:
    """Multiply positive rows above negative ones [2T, in] -> the integers [T, out] as fp32, rounded once."""
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    total = torch.zeros((), dtype=torch.int32)
    for part, packed in zip(both.split(PIECE, dim=1), pieces, strict=True):
        positive, negative = multiply(part, 1.0, 0, packed).chunk(2)
        total = total + (positive - negative).int()
    return total.float()


def _packed(values: Tensor):
    """Pack int8 [out, in] as FBGEMM reads it, with scales of 1."""
    ones, zeros = torch.ones(len(values), dtype=torch.double), torch.zeros(len(values), dtype=torch.long)
    chosen = torch.backends.quantized.engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch plans to remove quantized tensors, and torch.ops would say so on stderr
        make = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
        quantized = make(values.contiguous(), ones, zeros, 0)
    torch.backends.quantized.engine = ENGINE
    try:
        return torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = chosen
