"""Apply adapters to the outputs of one linear layer, y += B (A x), for all adapters of a step in two launches.

A tile is up to BLOCK_M neighbouring rows with one adapter, int64 [3]: the address of the adapter's table, the first
row, and the end of the rows. A table is int64 [places, 3]: for each linear layer the addresses of A [rank, in] and B
[out, rank], contiguous, in the dtype of x, and the rank, a multiple of BLOCK_R, or 0 if nothing is added. A row is
summed in one order, whatever shares its tile.
"""

import triton
import triton.language as tl

from baton.engine.kernels.tiles import dot, narrow

TILE_FIELDS, TABLE_FIELDS = tl.constexpr(3), tl.constexpr(3)


@triton.jit(do_not_specialize=["place"])
def shrink(
    x, tiles, inner, place, num_in, x_stride, inner_stride,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute inner [T, >= rank] = A x, rounded to its dtype. Grid (tiles, blocks of the largest rank)."""
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    pair = tl.load(tile).to(tl.pointer_type(tl.int64)) + place * TABLE_FIELDS
    first = tl.program_id(1) * BLOCK_R
    if first >= tl.load(pair + 2):
        return
    down = tl.load(pair).to(tl.pointer_type(x.dtype.element_ty))
    rows = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
    row_mask = rows < tl.load(tile + 2)
    ranks = first + tl.arange(0, BLOCK_R)
    x_rows = x + rows[:, None] * x_stride
    down_rows = down + ranks.to(tl.int64)[None, :] * num_in
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for k in range(0, num_in, BLOCK_K):
        ins = k + tl.arange(0, BLOCK_K)
        x_tile = tl.load(x_rows + ins[None, :], mask=row_mask[:, None] & (ins < num_in)[None, :], other=0.0)
        down_tile = tl.load(down_rows + ins[:, None], mask=(ins < num_in)[:, None], other=0.0)
        total = dot(x_tile, down_tile, total)
    places = rows[:, None] * inner_stride + ranks[None, :]
    tl.store(inner + places, narrow(total, inner.dtype.element_ty), mask=row_mask[:, None])


@triton.jit(do_not_specialize=["place"])
def expand(
    inner, tiles, y, place, num_out, inner_stride, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add y [T, out] += B inner, rounded to y's dtype first. Grid (tiles, blocks of outputs)."""
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    pair = tl.load(tile).to(tl.pointer_type(tl.int64)) + place * TABLE_FIELDS
    rank = tl.load(pair + 2)
    if rank == 0:
        return
    up = tl.load(pair + 1).to(tl.pointer_type(inner.dtype.element_ty))
    rows = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
    row_mask = rows < tl.load(tile + 2)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_mask = outs < num_out
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, rank, BLOCK_R):
        ranks = first + tl.arange(0, BLOCK_R)
        inner_tile = tl.load(inner + rows[:, None] * inner_stride + ranks[None, :], mask=row_mask[:, None], other=0.0)
        up_tile = tl.load(up + outs.to(tl.int64)[None, :] * rank + ranks[:, None], mask=out_mask[None, :], other=0.0)
        total = dot(inner_tile, up_tile, total)
    places = y + rows[:, None] * y_stride + outs[None, :]
    mask = row_mask[:, None] & out_mask[None, :]
    added = narrow(total, y.dtype.element_ty).to(tl.float32)
    sums = tl.load(places, mask=mask, other=0.0).to(tl.float32) + added
    tl.store(places, narrow(sums, y.dtype.element_ty), mask=mask)
