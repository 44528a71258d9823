"""Add the parts of ranks in the order of the tree that CPU ranks use (native/ranks.cpp): ((0 + 1) + (2 + 3)) + ((4 + 5)
+ (6 + 7)) in fp32, then the bias, rounded once. The torch twin is `add_tree` of parallel/distributed.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.tiles import narrow

BLOCK = 1024


def add_ranks(parts: Tensor, dtype: torch.dtype, bias: Tensor | None = None, first: int = 0) -> Tensor:
    """Add parts [ranks, elements], contiguous, of 2, 4 or 8 ranks -> [elements] in `dtype`. `bias`: fp32 [size of a
    row]; the elements are those of rows from element `first` on."""
    num_ranks, count = parts.shape
    out = parts.new_empty(count, dtype=dtype)
    size = 1 if bias is None else len(bias)
    _add[(triton.cdiv(count, BLOCK),)](
        parts, bias, out, count, first, size, NUM_RANKS=num_ranks, BLOCK=BLOCK, num_warps=4
    )
    return out


def add_peers(parts: Tensor, sums: Tensor, dtype: torch.dtype, bias: Tensor | None, first: int, count: int) -> None:
    """Add elements [first, first + count) of all ranks, fp32, and write the sums to all of them in `dtype`. `parts` and
    `sums`: int64 [ranks], the addresses of each rank's elements; `bias` as in add_ranks."""
    size = 1 if bias is None else len(bias)
    _add_peers[(triton.cdiv(count, BLOCK),)](
        parts, sums, bias, first, count, size, NUM_RANKS=len(parts), DTYPE=getattr(tl, str(dtype).split(".")[1]),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first"])
def _add(parts, bias, out, count, first, size, NUM_RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks of elements). `bias`: None without one."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < count
    total = _two(parts, 0, places, mask, count)
    if NUM_RANKS >= 4:
        total = total + _two(parts, 2, places, mask, count)
    if NUM_RANKS == 8:
        total = total + (_two(parts, 4, places, mask, count) + _two(parts, 6, places, mask, count))
    if bias is not None:
        total = total + tl.load(bias + (first + places) % size, mask=mask, other=0.0)
    tl.store(out + places, narrow(total, out.dtype.element_ty), mask=mask)


@triton.jit
def _two(parts, rank, places, mask, count):
    own = parts + places + count.to(tl.int64) * rank
    left = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    return left + tl.load(own + count, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["first"])
def _add_peers(
    parts, sums, bias, first, count, size, NUM_RANKS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (blocks of this rank's elements)."""
    own = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = own < count
    places = first + own
    total = _two_peers(parts, 0, places, mask)
    if NUM_RANKS >= 4:
        total = total + _two_peers(parts, 2, places, mask)
    if NUM_RANKS == 8:
        total = total + (_two_peers(parts, 4, places, mask) + _two_peers(parts, 6, places, mask))
    if bias is not None:
        total = total + tl.load(bias + places % size, mask=mask, other=0.0)
    rounded = narrow(total, DTYPE)
    for rank in tl.static_range(NUM_RANKS):
        theirs = tl.load(sums + rank).to(tl.pointer_type(DTYPE))
        tl.store(theirs + places, rounded, mask=mask)


@triton.jit
def _two_peers(parts, rank, places, mask):
    left = tl.load(parts + rank).to(tl.pointer_type(tl.float32))
    right = tl.load(parts + rank + 1).to(tl.pointer_type(tl.float32))
    return tl.load(left + places, mask=mask, other=0.0) + tl.load(right + places, mask=mask, other=0.0)
