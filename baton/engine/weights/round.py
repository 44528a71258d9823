"""Rounding to nearest: the simplest way from a float weight to a quantized form, without knowledge of its inputs.

Scales cover the largest value of their row or group, so nothing saturates. Weights are [out, in], any float dtype.
"""

import torch
from torch import Tensor

from baton.engine.weights.forms import Fp8Weight, IntWeight, pack_int4

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448


def round_symmetric(weight: Tensor, bits: int, group: int | None = None, activations: str = "none") -> IntWeight:
    """Round a weight [out, in]: q = round(w / s) with s = max |w| / (2 ** (bits - 1) - 1) per row and group of inputs
    (None: the whole row)."""
    grouped = _grouped(weight, group)
    largest = 2 ** (bits - 1) - 1
    scales = grouped.abs().amax(dim=2) / largest
    q = torch.round(grouped / _divisor(scales)).clamp_(-largest, largest)
    return _int_weight(q, bits, scales, None, activations)


def round_asymmetric(weight: Tensor, bits: int, group: int | None) -> IntWeight:
    """Round a weight: u = round(w / s) + z with s = (max - min) / (2 ** bits - 1) per row and group; w = s * (u - z).

    z is an integer, so files with zero points can hold it; 0 is within [min, max] and so exact.
    """
    grouped = _grouped(weight, group)
    low, high = grouped.amin(dim=2).clamp_(max=0), grouped.amax(dim=2).clamp_(min=0)
    levels, half = 2**bits - 1, 2 ** (bits - 1)
    scales = (high - low) / levels
    zeros = torch.round(-low / _divisor(scales).squeeze(2)).clamp_(0, levels)
    q = (torch.round(grouped / _divisor(scales)) + zeros.unsqueeze(2)).clamp_(0, levels) - half
    return _int_weight(q, bits, scales, scales * (half - zeros), "none")


def round_fp8(weight: Tensor, activations: str = "none") -> Fp8Weight:
    """Round a weight [out, in] to e4m3 with one scale per row, max |w| / 448."""
    rows = weight.float()
    scales = rows.abs().amax(dim=1, keepdim=True) / FP8_MAX
    values = (rows / torch.where(scales == 0, 1.0, scales)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Fp8Weight(values, scales, (1, weight.shape[1]), activations)


def _grouped(weight: Tensor, group: int | None) -> Tensor:
    """Return fp32 [out, in // group, group]. Raises ValueError if the group does not divide the inputs."""
    in_features = weight.shape[1]
    if in_features % (group or in_features):
        raise ValueError(f"groups of {group} do not divide {in_features} inputs")
    return weight.float().unflatten(1, (-1, group or in_features))


def _divisor(scales: Tensor) -> Tensor:
    """Return divisors for scales: 1 for the scale 0 of a group of zeros, which so stays zero."""
    return torch.where(scales == 0, 1.0, scales).unsqueeze(2)


def _int_weight(q: Tensor, bits: int, scales: Tensor, offsets: Tensor | None, activations: str) -> IntWeight:
    values = q.flatten(1).to(torch.int8)
    values = pack_int4(values) if bits == 4 else values
    return IntWeight(bits, values, scales, q.shape[2], offsets, activations=activations)
