"""Products with a weight of any form: y [M, out] = x [M, in] @ w.T, dequantized as it is read.

    dense   floating point            values [out, in]
    int8    int8, fp32 scales         values [out, in]
    fp8     e4m3, fp32 scales         values [out, in]
    int4    two columns in a byte     values [out, in / 2]; of each BLOCK_K columns the first half in the low halves
    w8a8    int8, x int8 with a scale per row, a segment's (or group's) products summed as integers

fp8 meets x as it is, or rounded to e4m3 (quantize.py), with a scale a row, or (X_GROUPED) for each group of the
weight's inputs: both are multiplied as e4m3 then, and products of BLOCK_K inputs are added in fp32, since the matrix
unit of compute capability 9.0 adds those of e4m3 in 14 bits.

Scales (and offsets) are fp32 [out, groups], a group of inputs each, or one a row. They meet a group's sum, not its
weights, so that 4 and 8-bit integers are multiplied as they are, exactly in bf16.

`multiply` cuts the inputs into segments whose number depends on the weight's shape alone. Either a program takes one
segment and leaves a partial sum that `add_segments` adds in order, or it takes all of them in that order (TREE: a power
of two, neighbours and then their sums, as weights/leaves.py tells): the same arithmetic, so that a row's bits do not
depend on which way was taken for how many rows, nor, in one tile shape, on the rows beside it. The torch twin of all is
`dequantize()` of weights/forms.py.
"""

import triton
import triton.language as tl

from baton.engine.kernels.tiles import dot, narrow


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x, w, scales, offsets, bias, x_scales, y, partials,
    num_rows, num_out, num_in, x_stride, w_stride, group, num_groups, segment_len, num_segments,
    KIND: tl.constexpr, GROUPED: tl.constexpr, OFFSETS: tl.constexpr, BIAS: tl.constexpr, PARTIAL: tl.constexpr,
    TREE: tl.constexpr, X_GROUPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows by a tile of a weight. Grid (tiles of rows, tiles of out, segments; 1 without PARTIAL).
    Programs of one tile of the weight start next to each other, so later ones may find it in the cache. BLOCK_K divides
    `group` and `segment_len`.

    partials fp32 [segments, M, out], scaled; y in its own dtype.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, out_mask = rows < num_rows, outs < num_out
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    w_rows = w + outs.to(tl.int64)[None, :] * w_stride
    scale_rows = outs * num_groups
    first, last = 0, num_segments
    if PARTIAL:
        first = tl.program_id(2)
        last = first + 1
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    one, two, four = total, total, total
    for segment in range(first, last):
        begin = segment * segment_len
        part = _segment(
            x_rows, w_rows, scales, offsets, scale_rows, x_scales, rows * num_groups, row_mask, out_mask,
            begin, tl.minimum(begin + segment_len, num_in), group,
            KIND, GROUPED, OFFSETS, X_GROUPED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        part = _scaled(part, scales, x_scales, rows, outs, row_mask, out_mask, KIND, GROUPED, X_GROUPED)
        if TREE and not PARTIAL:
            total, one, two, four = _add_leaf(segment, part, one, two, four)
        else:
            total = total + part
    mask = row_mask[:, None] & out_mask[None, :]
    places = rows.to(tl.int64)[:, None] * num_out + outs[None, :]
    if PARTIAL:
        tl.store(partials + tl.program_id(2) * num_rows * num_out + places, total, mask=mask)
    else:
        if BIAS:
            total = total + tl.load(bias + outs, mask=out_mask, other=0.0)[None, :]
        tl.store(y + places, narrow(total, y.dtype.element_ty), mask=mask)


@triton.jit
def _add_leaf(leaf, total, one, two, four):
    """Return the largest branch of up to 8 leaves that ends with `leaf`, and the sums of 1, 2 and 4 leaves that wait
    for their neighbour. For the last leaf the branch is the whole tree."""
    if leaf % 2 == 0:
        one = total
    else:
        total = one + total
        if leaf % 4 == 1:
            two = total
        else:
            total = two + total
            if leaf % 8 == 3:
                four = total
            else:
                total = four + total
    return total, one, two, four


@triton.jit
def _segment(
    x_rows, w_rows, scales, offsets, scale_rows, x_scales, x_scale_rows, row_mask, out_mask, begin, end, group,
    KIND: tl.constexpr, GROUPED: tl.constexpr, OFFSETS: tl.constexpr, X_GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the product of the inputs [begin, end), fp32 [BLOCK_M, BLOCK_N]."""
    HALF: tl.constexpr = BLOCK_K // 2
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if KIND == "w8a8" and not GROUPED else tl.float32)
    for k in range(begin, end, BLOCK_K):
        if KIND == "int4":
            halves = tl.arange(0, HALF)
            packed = tl.load(w_rows + (k // 2 + halves)[:, None], mask=out_mask[None, :], other=0x88)
            low_ins, high_ins = k + halves, k + HALF + halves
            x_low = tl.load(x_rows + low_ins[None, :], mask=row_mask[:, None] & (low_ins < end)[None, :], other=0.0)
            x_high = tl.load(x_rows + high_ins[None, :], mask=row_mask[:, None] & (high_ins < end)[None, :], other=0.0)
            low = narrow(((packed & 15).to(tl.int8) - 8).to(tl.float32), x_low.dtype)
            high = narrow(((packed >> 4).to(tl.int8) - 8).to(tl.float32), x_low.dtype)
            if GROUPED:
                part = dot(x_high, high, dot(x_low, low, tl.zeros([BLOCK_M, BLOCK_N], tl.float32)))
            else:
                acc = dot(x_high, high, dot(x_low, low, acc))
            if OFFSETS:
                x_sum = tl.sum(x_low.to(tl.float32), 1) + tl.sum(x_high.to(tl.float32), 1)
        else:
            ins = k + tl.arange(0, BLOCK_K)
            x_tile = tl.load(x_rows + ins[None, :], mask=row_mask[:, None] & (ins < end)[None, :], other=0.0)
            w_tile = tl.load(w_rows + ins[:, None], mask=out_mask[None, :] & (ins < end)[:, None], other=0.0)
            if KIND != "dense" and x_tile.dtype != w_tile.dtype:
                w_tile = narrow(w_tile.to(tl.float32), x_tile.dtype)
            if KIND == "w8a8":
                if GROUPED:
                    part = tl.dot(x_tile, w_tile, out_dtype=tl.int32).to(tl.float32)
                else:
                    acc = tl.dot(x_tile, w_tile, acc, out_dtype=tl.int32)
            elif GROUPED:
                part = dot(x_tile, w_tile, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                if X_GROUPED:
                    x_scale = tl.load(x_scales + x_scale_rows + k // group, mask=row_mask, other=0.0)
                    part = part * x_scale[:, None]
            elif KIND == "fp8" and x_tile.dtype == w_tile.dtype:
                acc = acc + dot(x_tile, w_tile, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            else:
                acc = dot(x_tile, w_tile, acc)
            if OFFSETS:
                x_sum = tl.sum(x_tile.to(tl.float32), 1)
        if GROUPED:
            scale = tl.load(scales + scale_rows + k // group, mask=out_mask, other=0.0)
            acc = acc + part * scale[None, :]
        if OFFSETS:
            offset = tl.load(offsets + scale_rows + k // group, mask=out_mask, other=0.0)
            acc = acc + x_sum[:, None] * offset[None, :]
    return acc.to(tl.float32)


@triton.jit
def _scaled(
    total, scales, x_scales, rows, outs, row_mask, out_mask, KIND: tl.constexpr, GROUPED: tl.constexpr,
    X_GROUPED: tl.constexpr,
):  # fmt: skip
    """Apply the scales that all inputs of a segment share."""
    if KIND != "dense" and not GROUPED:
        total = total * tl.load(scales + outs, mask=out_mask, other=0.0)[None, :]
    if x_scales is not None and not X_GROUPED:
        total = total * tl.load(x_scales + rows, mask=row_mask, other=0.0)[:, None]
    return total


@triton.jit(do_not_specialize=["num_rows"])
def add_segments(
    partials, bias, y, num_rows, num_out, num_segments,
    BIAS: tl.constexpr, TREE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add partial sums [segments, M, out] in the order of `multiply`. Grid (tiles of rows, tiles of out)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, out_mask = rows < num_rows, outs < num_out
    mask = row_mask[:, None] & out_mask[None, :]
    places = rows.to(tl.int64)[:, None] * num_out + outs[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    one, two, four = total, total, total
    for segment in range(num_segments):
        part = tl.load(partials + segment * num_rows * num_out + places, mask=mask, other=0.0)
        if TREE:
            total, one, two, four = _add_leaf(segment, part, one, two, four)
        else:
            total = total + part
    if BIAS:
        total = total + tl.load(bias + outs, mask=out_mask, other=0.0)[None, :]
    tl.store(y + places, narrow(total, y.dtype.element_ty), mask=mask)


@triton.jit
def multiply_row(
    x, w, scales, offsets, bias, x_scales, y, num_out, num_in, w_stride, group, num_groups,
    KIND: tl.constexpr, GROUPED: tl.constexpr, OFFSETS: tl.constexpr, BIAS: tl.constexpr, X_GROUPED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PACK_K: tl.constexpr,
):  # fmt: skip
    """Multiply one row without the matrix unit. Grid (tiles of out). PACK_K: the columns by which int4 bytes are
    packed. Not for w8a8."""
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_mask = outs < num_out
    w_rows = w + outs.to(tl.int64)[:, None] * w_stride
    scale_rows = outs[:, None] * num_groups
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in range(0, num_in, BLOCK_K):
        if KIND == "int4":
            octets = k + tl.arange(0, BLOCK_K)  # BLOCK_K bytes hold twice as many inputs, for two turns of the loop
            mask = octets * 2 < num_in
            packed = tl.load(w_rows + octets[None, :], mask=out_mask[:, None] & mask[None, :], other=0x88)
            low_ins = octets // (PACK_K // 2) * PACK_K + octets % (PACK_K // 2)
            low_mask, high_mask = mask & (low_ins < num_in), mask & (low_ins + PACK_K // 2 < num_in)
            x_low = tl.load(x + low_ins, mask=low_mask, other=0.0).to(tl.float32)[None, :]
            x_high = tl.load(x + low_ins + PACK_K // 2, mask=high_mask, other=0.0).to(tl.float32)[None, :]
            low = ((packed & 15).to(tl.int8) - 8).to(tl.float32)
            high = ((packed >> 4).to(tl.int8) - 8).to(tl.float32)
            part = low * x_low + high * x_high
            x_sum, first = x_low + x_high, low_ins
        else:
            ins = k + tl.arange(0, BLOCK_K)
            mask = ins < num_in
            w_tile = tl.load(w_rows + ins[None, :], mask=out_mask[:, None] & mask[None, :], other=0.0)
            x_tile = tl.load(x + ins, mask=mask, other=0.0).to(tl.float32)[None, :]
            if X_GROUPED:
                x_tile = x_tile * tl.load(x_scales + ins // group, mask=mask, other=0.0)[None, :]
            part = w_tile.to(tl.float32) * x_tile
            x_sum, first = x_tile, ins
        if GROUPED:
            places = scale_rows + (first // group)[None, :]
            seen = out_mask[:, None] & mask[None, :]
            part = part * tl.load(scales + places, mask=seen, other=0.0)
            if OFFSETS:
                part = part + x_sum * tl.load(offsets + places, mask=seen, other=0.0)
        acc = acc + part
    total = tl.sum(acc, 1)
    if KIND != "dense" and not GROUPED:
        total = total * tl.load(scales + outs, mask=out_mask, other=0.0)
    if x_scales is not None and not X_GROUPED:
        total = total * tl.load(x_scales)
    if BIAS:
        total = total + tl.load(bias + outs, mask=out_mask, other=0.0)
    tl.store(y + outs, narrow(total, y.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_rows"])
def scale_products(
    products, scales, x_scales, bias, y, num_rows, num_out, BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scale integers [M, out] that a library multiplied, with one scale per row and per output. Grid (tiles of rows,
    tiles of out)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, out_mask = rows < num_rows, outs < num_out
    mask = row_mask[:, None] & out_mask[None, :]
    places = rows.to(tl.int64)[:, None] * num_out + outs[None, :]
    total = tl.load(products + places, mask=mask, other=0).to(tl.float32)
    total = _scaled(total, scales, x_scales, rows, outs, row_mask, out_mask, "w8a8", False, False)
    if BIAS:
        total = total + tl.load(bias + outs, mask=out_mask, other=0.0)[None, :]
    tl.store(y + places, narrow(total, y.dtype.element_ty), mask=mask)
