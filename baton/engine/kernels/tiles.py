"""Code shared by the kernels: read and write rows of the pool in any stored form, round, and multiply.

Triton's interpreter (3.6.0) multiplies bf16 matrices wrongly, truncates where a GPU rounds fp32 to bf16, and loses a
carry where it rounds to fp8. INTERPRETED is the one switch for that: products are then done in fp32, with operands
rounded as a GPU rounds them.
"""

import torch
import triton
import triton.language as tl

from baton.engine.kernels import INTERPRETED as _INTERPRETED

if _INTERPRETED:
    from baton.engine.kernels.interpreter import mend

    mend()

INTERPRETED = tl.constexpr(_INTERPRETED)
HALF_MAX = tl.constexpr(torch.finfo(torch.float16).max)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds half to even below 2^22


@triton.jit
def load_rows(rows, scales, offsets, scale_offsets, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
              FORM: tl.constexpr, DTYPE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load rows of one token and head at element `offsets` [N], decoded as by `decode` of kv/stored_forms.py: [N,
    BLOCK_D] in DTYPE, zero where not `seen` [N]; without MASKED all are seen."""
    if FORM == "int4":
        halves = tl.arange(0, BLOCK_D // 2)
        mask = (halves < HEAD_DIM // 2)[None, :]
        if MASKED:
            mask = seen[:, None] & mask
        packed = tl.load(rows + offsets[:, None] + halves[None, :], mask=mask, other=0)
        scale = tl.load(scales + scale_offsets, mask=seen, other=0.0).to(tl.float32)
        zero = tl.load(scales + scale_offsets + 1, mask=seen, other=0.0).to(tl.float32)
        zero = tl.where(mask, zero[:, None], 0.0)
        low = (packed & 15).to(tl.float32) * scale[:, None] + zero
        high = (packed >> 4).to(tl.float32) * scale[:, None] + zero
        return narrow(tl.interleave(low, high), DTYPE)
    dims = tl.arange(0, BLOCK_D)
    mask = (dims < HEAD_DIM)[None, :]
    if MASKED:
        mask = seen[:, None] & mask
    values = tl.load(rows + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    if FORM == "int8":
        scale = tl.load(scales + scale_offsets, mask=seen, other=0.0).to(tl.float32)
        return narrow(values.to(tl.float32) * scale[:, None], DTYPE)
    if values.dtype == DTYPE:
        return values
    return narrow(values.to(tl.float32), DTYPE)


@triton.jit
def store_row(rows, scales, low, high, even, HEAD_DIM: tl.constexpr, FORM: tl.constexpr, LIMIT: tl.constexpr):
    """Store one row, fp32, as `encode` of kv/stored_forms.py does: its elements at `even` [N] in `low`, those behind
    them in `high`. LIMIT: what a cast saturates at; 0: it does not."""
    mask, odd_mask = even < HEAD_DIM, even + 1 < HEAD_DIM
    if FORM == "int8":
        largest = tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0))
        scale = tl.minimum(tl.div_rn(largest, 127.0), HALF_MAX).to(tl.float16)
        tl.store(scales, scale)
        tl.store(rows + even, _level(low, scale, -127.0, 127.0).to(tl.int8), mask=mask)
        tl.store(rows + even + 1, _level(high, scale, -127.0, 127.0).to(tl.int8), mask=odd_mask)
    elif FORM == "int4":
        least = tl.minimum(tl.min(tl.where(mask, low, float("inf")), 0), tl.min(tl.where(mask, high, float("inf")), 0))
        most = tl.maximum(tl.max(tl.where(mask, low, float("-inf")), 0), tl.max(tl.where(mask, high, float("-inf")), 0))
        scale = tl.minimum(tl.div_rn(most - least, 15.0), HALF_MAX).to(tl.float16)
        zero = tl.maximum(tl.minimum(least, HALF_MAX), -HALF_MAX).to(tl.float16)
        tl.store(scales, scale)
        tl.store(scales + 1, zero)
        first = _level(low - zero.to(tl.float32), scale, 0.0, 15.0).to(tl.uint8)
        second = _level(high - zero.to(tl.float32), scale, 0.0, 15.0).to(tl.uint8)
        tl.store(rows + even // 2, first | (second << 4), mask=mask)
    else:
        if LIMIT > 0.0:
            low = tl.maximum(tl.minimum(low, LIMIT), -LIMIT)
            high = tl.maximum(tl.minimum(high, LIMIT), -LIMIT)
        tl.store(rows + even, narrow(low, rows.dtype.element_ty), mask=mask)
        tl.store(rows + even + 1, narrow(high, rows.dtype.element_ty), mask=odd_mask)


@triton.jit
def _level(x, scale, MIN: tl.constexpr, MAX: tl.constexpr):
    """Return x / scale, rounded half to even, within [MIN, MAX]; 0 if the scale is 0."""
    scale = scale.to(tl.float32)
    level = tl.where(scale == 0.0, 0.0, tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale)))
    level = tl.maximum(tl.minimum(level, MAX), MIN)
    return (level + ROUND) - ROUND


@triton.jit
def dot(a, b, acc):
    """Return acc + a @ b in fp32; fp32 operands are not cut to tf32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Round fp32 to DTYPE, half to even. fp8 takes values within its finite range."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if INTERPRETED and tl.float8e4nv == DTYPE:
        return _on_grid(x, 3, -6).to(DTYPE)
    if INTERPRETED and tl.float8e5 == DTYPE:
        return _on_grid(x, 2, -14).to(DTYPE)
    return x.to(DTYPE)


@triton.jit
def _on_grid(x, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Round x to a value with MANTISSA bits and an exponent of at least MIN_EXPONENT, so that the cast that follows is
    exact."""
    exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127, MIN_EXPONENT)
    quantum = ((exponent - MANTISSA + 127) << 23).to(tl.float32, bitcast=True)
    return ((x / quantum + ROUND) - ROUND) * quantum
