"""The integers to which a weight is rounded: one scale for each row and group of inputs, no zero points.

Zero points would make plain rounding better at 4 bits, but transformers (5.23) does not load packed ones unless told to
expand them, and every kernel pays for them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.weights.forms import IntWeight, pack_int4

SHRINKS = tuple(1 - step / 40 for step in range(17))  # 1.0 to 0.6 of a group's range


@dataclass(frozen=True)
class Grid:
    """A grid of values: q = round(w / scale) in [-2^(bits-1), 2^(bits-1))."""

    bits: int
    group: int  # inputs per scale
    scales: Tensor  # fp32 [out, in // group], already rounded to the file's dtype

    def round(self, weight: Tensor) -> Tensor:
        """Round a weight fp32 [out, in] to q, fp32 whole numbers [out, in]."""
        return _round(weight.unflatten(1, (-1, self.group)), self.scales, self.bits).flatten(1)

    def round_column(self, column: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Round one input's weights fp32 [out]; return q and the values that it represents, both fp32 [out]."""
        scales = self.scales[:, index // self.group]
        half = 2 ** (self.bits - 1)
        q = torch.round(column / scales).clamp_(-half, half - 1)
        return q, q * scales

    def form(self, q: Tensor) -> IntWeight:
        """Return the weight form of q, whole numbers [out, in]."""
        q = q.to(torch.int8)
        values = pack_int4(q) if self.bits == 4 else q
        return IntWeight(self.bits, values, self.scales, self.group)


def fit(weight: Tensor, bits: int, group: int, dtype: torch.dtype, importance: Tensor | None = None) -> Grid:
    """Return a grid for weight fp32 [out, in]; `dtype` is that of the stored scales.

    By default it spans each group's largest weight (plain rounding). With `importance` [in] >= 0, the weight of an
    input's squared error, it has the shrunken range with the least squared error, trading a few clipped weights for
    finer steps (as AWQ does, arXiv 2306.00978)."""
    grouped = weight.unflatten(1, (-1, group))
    span = grouped.abs().amax(dim=2) / (2 ** (bits - 1) - 1)
    scales = _stored(span, dtype)
    if importance is not None:
        factors = importance.view(1, -1, group)
        least = _error(grouped, scales, bits, factors)
        for shrink in SHRINKS[1:]:
            tried = _stored(span * shrink, dtype)
            error = _error(grouped, tried, bits, factors)
            scales = torch.where(error < least, tried, scales)
            least = torch.minimum(error, least)
    return Grid(bits, group, scales)


def dequantize(grid: Grid, weight: Tensor) -> Tensor:
    """Return a weight fp32 [out, in] after plain rounding on a grid."""
    return (grid.round(weight).unflatten(1, (-1, grid.group)) * grid.scales.unsqueeze(2)).flatten(1)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales as the file holds them; a group of zeros has scale 1."""
    scales = scales.to(dtype).float()
    return torch.where(scales == 0, 1.0, scales)


def _round(grouped: Tensor, scales: Tensor, bits: int) -> Tensor:
    half = 2 ** (bits - 1)
    return torch.round(grouped / scales.unsqueeze(2)).clamp_(-half, half - 1)


def _error(grouped: Tensor, scales: Tensor, bits: int, importance: Tensor) -> Tensor:
    """Return the weighted squared error of every group, [out, in // group]."""
    difference = _round(grouped, scales, bits).mul_(scales.unsqueeze(2)).sub_(grouped)
    return difference.square_().mul_(importance).sum(dim=2)
