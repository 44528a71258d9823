"""Compute on rows between two products: residual and RMSNorm in one pass, SiLU times up in another, with the result
rounded if the next product wants that. Each row has its own program, so its bits do not depend on others. The torch
twins are layers/norm.py and layers/activation.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.quantize import RoundedRows, Rounding, scale_of, store_rounded
from baton.engine.kernels.tiles import narrow

SWIGLU_BLOCK, SWIGLU_ROW_BLOCK = 1024, 4096
NOT_ROUNDED = {"GROUP": 0, "STATIC": False}
Clamp = tuple[float, float]  # alpha and limit of a clamped SwiGLU
NOT_CLAMPED = (1.0, 0.0)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add delta to x [T, size] in place; return its RMSNorm in the dtype of x. All are contiguous."""
    out = torch.empty_like(x)
    _launch_norm(x, delta, weight, eps, out, None, 0.0, NOT_ROUNDED)
    return out


def add_norm_rounded(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, rounding: Rounding) -> RoundedRows:
    """Do as `add_norm`, then round the result to the dtype of x and from that by `rounding`."""
    out = rounding.empty(*x.shape, x.device)
    _launch_norm(x, delta, weight, eps, *out, rounding.scale, rounding.constants)
    return out


def _launch_norm(x, delta, weight, eps, out, scales, static_scale, constants) -> None:
    size = x.shape[1]
    _add_norm[(x.shape[0],)](
        x, x if delta is None else delta, weight, out, scales, size, eps, static_scale, ADDS=delta is not None,
        **constants, BLOCK=triton.next_power_of_2(size), num_warps=8 if size > 2048 else 4,
    )  # fmt: skip


def swiglu(gate_up: Tensor, clamp: Clamp | None = None) -> Tensor:
    """Return silu(gate) * up [T, size] of [T, 2 * size], gates first, contiguous; with `clamp` as the twin's
    clamped_swiglu."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    _swiglu[(num_rows, triton.cdiv(size, SWIGLU_BLOCK))](
        gate_up, out, None, size, 0.0, *(clamp or NOT_CLAMPED), **NOT_ROUNDED, CLAMPED=clamp is not None,
        BLOCK=SWIGLU_BLOCK,
    )  # fmt: skip
    return out


def swiglu_rounded(gate_up: Tensor, rounding: Rounding, clamp: Clamp | None = None) -> RoundedRows:
    """Do as `swiglu`, then round the result to the dtype of gate_up and from that by `rounding`."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = rounding.empty(num_rows, size, gate_up.device)
    block = SWIGLU_ROW_BLOCK if rounding.of_rows else SWIGLU_BLOCK
    _swiglu[(num_rows, 1 if rounding.of_rows else triton.cdiv(size, block))](
        gate_up, *out, size, rounding.scale, *(clamp or NOT_CLAMPED), **rounding.constants, CLAMPED=clamp is not None,
        BLOCK=block, num_warps=8 if rounding.of_rows else 4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["static_scale"])
def _add_norm(
    x, delta, weight, out, scales, size, eps, static_scale,
    ADDS: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add and norm one row. `scales`: of the rounded rows; None: they are not rounded."""
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
    normed = narrow(scaled, x.dtype.element_ty)
    if scales is None:
        tl.store(out + begin + places, normed, mask=mask)
    else:
        block, row_scale = normed.to(tl.float32), static_scale
        if GROUP == 0 and not STATIC:
            row_scale = scale_of(tl.max(tl.abs(block), 0), out.dtype.element_ty)
        store_rounded(block, out, scales, tl.program_id(0).to(tl.int64), 0, size, row_scale, GROUP, BLOCK)


@triton.jit(do_not_specialize=["static_scale", "alpha", "limit"])
def _swiglu(
    gate_up, out, scales, size, static_scale, alpha, limit,
    GROUP: tl.constexpr, STATIC: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gate a block of a row. Grid (rows, blocks; 1 if a row has its own scale). `scales`: of the rounded rows,
    or None."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    if scales is None:
        places = first + tl.arange(0, BLOCK)
        tl.store(
            out + row * size + places,
            _gated(gate_up, row, first, size, alpha, limit, CLAMPED, BLOCK),
            mask=places < size,
        )
    else:
        scale = static_scale
        if GROUP == 0 and not STATIC:
            largest = tl.zeros([BLOCK], tl.float32)
            for begin in range(0, size, BLOCK):
                block = _gated(gate_up, row, begin, size, alpha, limit, CLAMPED, BLOCK).to(tl.float32)
                largest = tl.maximum(largest, tl.abs(block))
            scale = scale_of(tl.max(largest, 0), out.dtype.element_ty)
        for begin in range(first, size, tl.num_programs(1) * BLOCK):
            block = _gated(gate_up, row, begin, size, alpha, limit, CLAMPED, BLOCK).to(tl.float32)
            store_rounded(block, out, scales, row, begin, size, scale, GROUP, BLOCK)


@triton.jit
def _gated(gate_up, row, begin, size, alpha, limit, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):
    """Return silu(gate) * up from `begin` on [BLOCK], in the dtype of gate_up, with zeros after the last."""
    places = begin + tl.arange(0, BLOCK)
    mask = places < size
    gate = tl.load(gate_up + row * 2 * size + places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + places, mask=mask, other=0.0).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit) + 1.0
        return narrow(gate / (1.0 + tl.exp(-alpha * gate)) * up, gate_up.dtype.element_ty)
    return narrow(gate / (1.0 + tl.exp(-gate)) * up, gate_up.dtype.element_ty)
