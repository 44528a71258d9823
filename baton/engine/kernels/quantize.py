"""Round activations to int8 or e4m3 with fp32 scales, of whole rows or of groups of inputs: in a kernel of its own, and
in the kernels of rows.py before they store. The torch twin of e4m3 is layers/linear/rounding.py."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.tiles import ROUND, narrow
from baton.engine.weights.on_gpu import MAX_GROUP

BLOCK = MAX_GROUP
E4M3_MAX = tl.constexpr(448.0)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Describe how a weight's input is rounded: to which type, with a scale for how many inputs."""

    dtype: torch.dtype  # int8 | float8_e4m3fn
    group: int = 0  # a power of two up to MAX_GROUP that divides a row; 0: one scale per row
    scale: float = 0.0  # of all inputs, known beforehand; 0: each row's or group's own

    @property
    def constants(self) -> dict[str, int | bool]:
        return {"GROUP": self.group, "STATIC": self.scale > 0.0}

    @property
    def of_rows(self) -> bool:
        """Return whether a row's scale is known only once the whole row is."""
        return self.group == 0 and self.scale == 0.0

    def empty(self, num_rows: int, num_in: int, device: torch.device) -> "RoundedRows":
        """Return uninitialized rounded rows."""
        scales = torch.empty(num_rows, num_in // (self.group or num_in), dtype=torch.float32, device=device)
        return RoundedRows(torch.empty(num_rows, num_in, dtype=self.dtype, device=device), scales)


class RoundedRows(NamedTuple):
    """Hold rows as values * scales, with a scale for each group of inputs."""

    values: Tensor  # [T, in], contiguous
    scales: Tensor  # fp32 [T, groups]


def round_rows(x: Tensor, rounding: Rounding, largest: Tensor | None) -> RoundedRows:
    """Round x [T, in], with contiguous inputs; `largest` [T]: magnitudes of whole rows if x is a part of them."""
    num_rows, num_in = x.shape
    made = rounding.empty(num_rows, num_in, x.device)
    programs = 1 if rounding.of_rows else triton.cdiv(num_in, BLOCK)
    _round_rows[(num_rows, programs)](
        x, largest if rounding.of_rows else None, *made, num_in, x.stride(0), rounding.scale,
        **rounding.constants, BLOCK=BLOCK,
    )  # fmt: skip
    return made


@triton.jit(do_not_specialize=["static_scale"])
def _round_rows(
    x, given, values, scales, num_in, x_stride, static_scale,
    GROUP: tl.constexpr, STATIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round a block of a row. Grid (rows, blocks of inputs; 1 if a row has its own scale). `given`: the largest
    magnitudes, or None."""
    row = tl.program_id(0).to(tl.int64)
    scale = static_scale
    if GROUP == 0 and not STATIC:
        if given is None:
            largest = tl.zeros([BLOCK], tl.float32)
            for begin in range(0, num_in, BLOCK):
                largest = tl.maximum(largest, tl.abs(_block_of(x, row, begin, num_in, x_stride, BLOCK)))
            scale = scale_of(tl.max(largest, 0), values.dtype.element_ty)
        else:
            scale = scale_of(tl.load(given + row), values.dtype.element_ty)
    for begin in range(tl.program_id(1) * BLOCK, num_in, tl.num_programs(1) * BLOCK):
        block = _block_of(x, row, begin, num_in, x_stride, BLOCK)
        store_rounded(block, values, scales, row, begin, num_in, scale, GROUP, BLOCK)


@triton.jit
def _block_of(x, row, begin, num_in, x_stride, BLOCK: tl.constexpr):
    ins = begin + tl.arange(0, BLOCK)
    return tl.load(x + row * x_stride + ins, mask=ins < num_in, other=0.0).to(tl.float32)


@triton.jit
def scale_of(largest, DTYPE: tl.constexpr):
    """Return the scale of inputs with this largest magnitude."""
    if tl.int8 == DTYPE:
        return tl.div_rn(largest, 127.0)
    return tl.maximum(tl.div_rn(largest, E4M3_MAX), 1e-12)


@triton.jit
def store_rounded(block, values, scales, row, begin, num_in, scale, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Store a row's inputs from `begin` on, fp32 [BLOCK], with zeros after the last, by `scale` or by that of each
    GROUP."""
    ins = begin + tl.arange(0, BLOCK)
    if GROUP > 0:
        groups = tl.reshape(block, [BLOCK // GROUP, GROUP])
        scale_of_group = scale_of(tl.max(tl.abs(groups), 1), values.dtype.element_ty)
        levels = tl.reshape(_levels(groups, scale_of_group[:, None], values.dtype.element_ty), [BLOCK])
        places = begin // GROUP + tl.arange(0, BLOCK // GROUP)
        mask = places < num_in // GROUP
        tl.store(scales + row * (num_in // GROUP) + places, scale_of_group, mask=mask)
    else:
        levels = _levels(block, scale, values.dtype.element_ty)
        if begin == 0:
            tl.store(scales + row, scale)
    tl.store(values + row * num_in + ins, levels, mask=ins < num_in)


@triton.jit
def _levels(x, scale, DTYPE: tl.constexpr):
    """Return x / scale, rounded half to even, within the range of the type."""
    if tl.int8 == DTYPE:
        level = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale) + tl.zeros_like(x))
        return ((level + ROUND) - ROUND).to(tl.int8)
    level = tl.div_rn(x, scale + tl.zeros_like(x))
    return narrow(tl.maximum(tl.minimum(level, E4M3_MAX), -E4M3_MAX), DTYPE)
