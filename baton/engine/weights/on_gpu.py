"""A weight as GPU kernels take it (kernels/linear.py), and why they do not take a form."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight, Weight

MAX_BLOCK_K, MIN_BLOCK_K = 128, 32
MAX_GROUP = 1024  # inputs that share a scale of rounded activations
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class Stored:
    """Hold a weight as the kernels take it."""

    kind: str  # see kernels/linear.py
    values: Tensor
    num_out: int
    num_in: int
    block_k: int
    group: int  # inputs per scale
    scales: Tensor | None = None  # fp32 [out, groups]
    offsets: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.values, self.scales, self.offsets) if part is not None)

    @property
    def is_grouped(self) -> bool:
        """Return whether scales are applied to each group's sum, not to the whole; so are offsets, even with
        one group."""
        return self.scales is not None and (self.scales.shape[1] > 1 or self.offsets is not None)


def unfit_on_gpu(weight: Weight, dtype: torch.dtype) -> str:
    """Return why the kernels cannot apply a weight in this compute dtype; "" if they can."""
    if dtype not in DTYPES:
        return f"computes in bf16, fp16 and fp32, not in {dtype}"
    if isinstance(weight, DenseWeight):
        return ""
    if isinstance(weight, Fp8Weight) and weight.values.is_cuda and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        return "fp8 needs compute capability {}.{}".format(*FP8_CAPABILITY)
    group = weight.group if isinstance(weight, IntWeight) else weight.block[1]
    num_in = weight.shape[1]
    if group < num_in and (group % MIN_BLOCK_K or num_in % group):
        return f"groups of {group} inputs"
    if weight.activations == "dynamic-block" and group < num_in and (group & (group - 1) or group > MAX_GROUP):
        return f"activations rounded by blocks of {group} inputs"
    if (
        isinstance(weight, IntWeight)
        and weight.activations == "dynamic"
        and (weight.bits == 4 or weight.offsets is not None)
    ):
        return "int4 weights, and weights with offsets, meet activations as they are"
    return ""


def store(weight: Weight, dtype: torch.dtype) -> Stored:
    """Return a weight that `unfit_on_gpu` accepts, as the kernels take it."""
    num_out, num_in = weight.shape
    if isinstance(weight, DenseWeight):
        return Stored("dense", weight.values.to(dtype).contiguous(), num_out, num_in, 64, num_in)
    if isinstance(weight, Fp8Weight):
        scales = weight.scales.repeat_interleave(weight.block[0], 0)[:num_out].contiguous()
        group = min(weight.block[1], num_in)
        return Stored("fp8", weight.values.contiguous(), num_out, num_in, block_k(group, num_in), group, scales)
    group, block = weight.group, block_k(weight.group, num_in)
    scales = weight.scales.contiguous()
    offsets = None if weight.offsets is None else weight.offsets.contiguous()
    if weight.bits == 4:
        return Stored("int4", packed_by(weight.values, num_in, block), num_out, num_in, block, group, scales, offsets)
    kind = "w8a8" if weight.activations == "dynamic" else "int8"
    return Stored(kind, weight.values.contiguous(), num_out, num_in, block, group, scales, offsets)


def block_k(group: int, num_in: int) -> int:
    """Return the inputs per tile: a power of two that divides a group."""
    if group == num_in:
        return MAX_BLOCK_K
    return min(MAX_BLOCK_K, group & -group)


def packed_by(values: Tensor, num_in: int, block: int) -> Tensor:
    """Repack int4, stored as neighbours in a byte [out, in / 2]: of every `block` columns the first half goes to the
    low halves; zeros follow the last column."""
    halves = torch.stack((values & 15, values >> 4), dim=2).flatten(1)
    halves = F.pad(halves, (0, -num_in % block), value=8).unflatten(1, (-1, 2, block // 2))
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1).contiguous()


def levels_of(packed: Tensor, block: int) -> Tensor:
    """Return the levels that `packed_by` packed: q + 8, uint8 [out, in], with zeros after the last column."""
    halves = packed.unflatten(1, (-1, block // 2))
    return torch.cat((halves & 15, halves >> 4), dim=2).flatten(1)
