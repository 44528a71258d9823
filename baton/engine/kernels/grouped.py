"""Products of rows with one of several weights of one shape each: the experts of a mixture, the heads of latent
attention.

A place is a row together with its weight, the owner. `sort` puts places in the order of their owners, by a counting
sort, and divides each owner's places into tiles of rows. All of it runs on the device, so a step has the same launches
whatever was chosen, and may be captured. `multiply_grouped` is `multiply` of linear.py for such tiles: with the same
segments of inputs, added in the same order, so a row has the same bits.
"""

import triton
import triton.language as tl

from baton.engine.kernels.linear import _add_leaf, _scaled, _segment
from baton.engine.kernels.tiles import narrow

NO_OWNER = tl.constexpr(-1)


@triton.jit(do_not_specialize=["num_places", "num_slots"])
def sort(
    owners, order, tiles, num_places, num_slots,
    NUM_OWNERS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sort one owner's places into `order` int32 [num_places], after those of lower owners and otherwise as they come.
    Grid (NUM_OWNERS).

    owners: integers [num_places]. tiles int32 [3, num_slots]: a tile's owner, the first of its places in `order`, and
    the end of them; those of the lowest owner first, NO_OWNER after the last tile. BINS: a power of two above
    NUM_OWNERS.
    """
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, num_places, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        found = tl.load(owners + places, mask=places < num_places, other=BINS - 1).to(tl.int32)
        counts += tl.histogram(found, BINS)
    counts = tl.where(bins < NUM_OWNERS, counts, 0)
    num_tiles = (counts + TILE - 1) // TILE
    count = tl.sum(tl.where(bins == own, counts, 0), 0)
    first = tl.sum(tl.where(bins < own, counts, 0), 0)
    slot = tl.sum(tl.where(bins < own, num_tiles, 0), 0)
    behind = slot + (count + TILE - 1) // TILE
    for begin in range(slot, behind, BLOCK):
        slots = begin + tl.arange(0, BLOCK)
        mask = slots < behind
        begins = first + (slots - slot) * TILE
        tl.store(tiles + slots, own + tl.zeros_like(slots), mask=mask)
        tl.store(tiles + num_slots + slots, begins, mask=mask)
        tl.store(tiles + 2 * num_slots + slots, tl.minimum(begins + TILE, first + count), mask=mask)
    if own == NUM_OWNERS - 1:
        for begin in range(behind, num_slots, BLOCK):
            slots = begin + tl.arange(0, BLOCK)
            tl.store(tiles + slots, tl.full([BLOCK], NO_OWNER, tl.int32), mask=slots < num_slots)
    if count > 0:
        for begin in range(0, num_places, BLOCK):
            places = begin + tl.arange(0, BLOCK)
            found = tl.load(owners + places, mask=places < num_places, other=BINS - 1).to(tl.int32)
            is_own = (found == own).to(tl.int32)
            tl.store(order + first + tl.cumsum(is_own, 0) - 1, places, mask=is_own > 0)
            first += tl.sum(is_own, 0)


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def multiply_grouped(
    x, w, scales, offsets, bias, x_scales, y, order, tiles,
    num_slots, num_rows, num_owners, num_out, num_in, x_stride, w_stride, group, num_groups, segment_len, num_segments,
    TOP_K: tl.constexpr, SCATTERS: tl.constexpr, KIND: tl.constexpr, GROUPED: tl.constexpr, OFFSETS: tl.constexpr,
    BIAS: tl.constexpr, TREE: tl.constexpr, X_GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of rows by a tile of its owner's weight. Grid (slots, tiles of out). Weights, scales, offsets
    and biases of all owners lie one above the other.

    TOP_K: neighbouring places per row of x; 0: x is in the order of `order`. SCATTERS: y is in the order of places,
    else in that of `order`. BLOCK_M: rows of a tile, as `sort` divided them. Without `tiles` each of `num_rows` rows
    has a place for every owner, in turn, with a row of x and y each, and every owner has equally many slots. Otherwise
    as `multiply`.
    """
    slot = tl.program_id(0)
    if tiles is None:
        slots_each = num_slots // num_owners
        owner = slot // slots_each
        sorted_rows = slot % slots_each * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = sorted_rows < num_rows
        places = sorted_rows * num_owners + owner
        rows = places
    else:
        owner = tl.load(tiles + slot)
        if owner == NO_OWNER:
            return
        sorted_rows = tl.load(tiles + num_slots + slot) + tl.arange(0, BLOCK_M)
        row_mask = sorted_rows < tl.load(tiles + 2 * num_slots + slot)
        places = sorted_rows
        if TOP_K > 0 or SCATTERS:
            places = tl.load(order + sorted_rows, mask=row_mask, other=0)
        rows = places // TOP_K if TOP_K > 0 else sorted_rows
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_mask = outs < num_out
    above = owner.to(tl.int64) * num_out  # outputs of the weights above this one
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    w_rows = w + (above + outs)[None, :] * w_stride
    if KIND != "dense":
        scales += above * num_groups
    if OFFSETS:
        offsets += above * num_groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    one, two, four = total, total, total
    for segment in range(num_segments):
        begin = segment * segment_len
        part = _segment(
            x_rows, w_rows, scales, offsets, outs * num_groups, x_scales, rows * num_groups, row_mask, out_mask,
            begin, tl.minimum(begin + segment_len, num_in), group,
            KIND, GROUPED, OFFSETS, X_GROUPED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        part = _scaled(part, scales, x_scales, rows, outs, row_mask, out_mask, KIND, GROUPED, X_GROUPED)
        if TREE:
            total, one, two, four = _add_leaf(segment, part, one, two, four)
        else:
            total = total + part
    if BIAS:
        total = total + tl.load(bias + above + outs, mask=out_mask, other=0.0)[None, :]
    y_rows = places if SCATTERS else sorted_rows
    y_places = y_rows.to(tl.int64)[:, None] * num_out + outs[None, :]
    tl.store(y + y_places, narrow(total, y.dtype.element_ty), mask=row_mask[:, None] & out_mask[None, :])


@triton.jit
def add_chosen(outputs, weights, y, size, NUM_CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Add the outputs of NUM_CHOSEN experts for a row, [T * NUM_CHOSEN, size], times their weights fp32, in the order
    in which it chose them: y fp32 [T, size]. Grid (T, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(NUM_CHOSEN):
        place = row * NUM_CHOSEN + slot
        part = tl.load(outputs + place * size + columns, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            part = part * tl.load(weights + place)
        total = total + part
    tl.store(y + row * size + columns, total, mask=mask)
