"""Finish rows after a recurrence: gate them by SiLU, and norm them in parts, before or after that. Each part has its
own program."""

import triton
import triton.language as tl

from baton.engine.kernels.tiles import narrow


@triton.jit(do_not_specialize=["eps"])
def finish(
    y, rows, weight, out, row_stride, inner, size, eps,
    NORMED: tl.constexpr, NORM_FIRST: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gate and norm y fp32 [T, inner] by the gates at the beginning of projected rows; put out [T, inner], in its
    dtype. NORMED: parts of `size` elements are RMS-normed, with `weight` fp32 [inner], or with SHARED [size] for all
    parts; NORM_FIRST: before they are gated. Grid (T, parts)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    places = tl.program_id(1) * size + lanes
    mask = (lanes < size) & (places < inner)
    part = tl.load(y + row * inner + places, mask=mask, other=0.0)
    gates = tl.load(rows + row * row_stride + places, mask=mask, other=0.0).to(tl.float32)
    gates = gates / (1.0 + tl.exp(-gates))
    if not NORM_FIRST:
        part = part * gates
    if NORMED:
        part = part * (1.0 / tl.sqrt(tl.sum(part * part, 0) / size + eps))
        part = part * tl.load(weight + (lanes if SHARED else places), mask=mask, other=0.0)
    if NORM_FIRST:
        part = part * gates
    tl.store(out + row * inner + places, narrow(part, out.dtype.element_ty), mask=mask)
