"""What the kernels share: reading rows of the pool in any stored form, rounding, and products.

Triton's interpreter (3.6.0) multiplies bf16 matrices wrongly, truncates where a GPU rounds fp32 to bf16, and loses a
carry where it rounds to fp8. INTERPRETED is the one switch for that: products are done in fp32 there, of operands that
were rounded as a GPU rounds them.
"""

import triton
import triton.language as tl

from baton.engine.kernels import INTERPRETED as _INTERPRETED

if _INTERPRETED:
    from baton.engine.kernels.interpreter import mend

    mend()

INTERPRETED = tl.constexpr(_INTERPRETED)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it rounds half to even below 2^22


@triton.jit
def load_rows(rows, scales, offsets, scale_offsets, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
              FORM: tl.constexpr, DTYPE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Rows of one token and head at element `offsets` [N], decoded as kv/stored_forms.py's `decode` does:
    [N, BLOCK_D] in DTYPE, zero where not `seen` [N]; not MASKED: all are."""
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
def dot(a, b, acc):
    """acc + a @ b in fp32; fp32 operands are not cut to tf32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """fp32 -> DTYPE, half to even. fp8 takes what lies within its finite range."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if INTERPRETED and tl.float8e4nv == DTYPE:
        return _on_grid(x, 3, -6).to(DTYPE)
    if INTERPRETED and tl.float8e5 == DTYPE:
        return _on_grid(x, 2, -14).to(DTYPE)
    return x.to(DTYPE)


@triton.jit
def _on_grid(x, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """x rounded to a value with MANTISSA bits, of exponent LEAST or more: the cast that follows is exact."""
    exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127, LEAST)
    quantum = ((exponent - MANTISSA + 127) << 23).to(tl.float32, bitcast=True)
    return ((x / quantum + ROUND) - ROUND) * quantum
