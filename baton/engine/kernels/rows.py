"""Compute on rows between two products: residual and RMSNorm in one pass, SiLU times up in another. A row is a
program's own, so its bits do not depend on others. The torch twins are layers/norm.py and layers/activation.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.tiles import narrow

SWIGLU_BLOCK = 1024


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x [T, size] += delta, in place; RMSNorm of that, in the dtype of x. All contiguous."""
    out = torch.empty_like(x)
    size = x.shape[1]
    _add_norm[(x.shape[0],)](
        x, x if delta is None else delta, weight, out, size, eps, ADDS=delta is not None,
        BLOCK=triton.next_power_of_2(size), num_warps=8 if size > 2048 else 4,
    )  # fmt: skip
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2 * size], gates first, contiguous -> silu(gate) * up [T, size]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    _swiglu[(num_rows, triton.cdiv(size, SWIGLU_BLOCK))](gate_up, out, size, BLOCK=SWIGLU_BLOCK)
    return out


@triton.jit
def _add_norm(x, delta, weight, out, size, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    mask = places < size
    begin = tl.program_id(0).to(tl.int64) * size
    row = tl.load(x + begin + places, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        row = row + tl.load(delta + begin + places, mask=mask, other=0.0).to(tl.float32)
        rounded = narrow(row, x.dtype.element_ty)
        tl.store(x + begin + places, rounded, mask=mask)
        row = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(row * row, 0) / size + eps)
    scaled = row * scale * tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + begin + places, narrow(scaled, out.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    gate = tl.load(gate_up + row * 2 * size + places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * size + places, narrow(gate / (1.0 + tl.exp(-gate)) * up, out.dtype.element_ty), mask=mask)
