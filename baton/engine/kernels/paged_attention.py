"""Attention over the paged pool: chunks with a prefix and decode tokens, any group size, windows, any stored form.

One program takes a tile of query rows that share a KV head (token after token, the heads of a token side by side) and
walks KV in spans of BLOCK_N absolute positions with a running maximum and sum (FlashAttention-2, Dao 2023). KV is
divided into splits of `split_len` positions. Either programs share the splits and leave partial results that `combine`
merges (Flash-Decoding, Dao et al. 2023), or one program takes all splits.

In the fixed form the tile's shape and split_len are constants, and a split's result and the merging of splits are the
same arithmetic in both ways, without contraction to fma. So a row's bits do not depend on what shares its tile or step,
or on which way was taken. The torch twin is attention/reference.py.

In a CUDA graph only the kernel knows how far a step reads: the grid is made for the GPU, not for the longest context.
"""

import triton
import triton.language as tl

from baton.engine.kernels.tiles import dot, load_rows, narrow

LOG2_E = 1.4426950408889634
TO_LOG2 = tl.constexpr(LOG2_E)
# Splits that `combine` reads together, since each read in turn would wait for the memory.
GROUP_LOADS = tl.constexpr(16)


# Values that change from step to step: Triton makes no special kernels for 1 and for multiples of 16.
@triton.jit(
    do_not_specialize=["table_stride", "window", "split_len", "num_splits", "tiles_per_seq", "num_sharing", "tile_rows"]
)
def attend(
    q, out, partials, stats, k, v, k_scales, v_scales, sinks, tiles, query_starts, kv_lens, block_table, items, owners,
    q_stride, q_head_stride, out_stride, table_stride, block_stride, head_stride, token_stride,
    scale_block_stride, scale_head_stride, scale_token_stride,
    log2_scale, log2_cap, window, block_size, split_len, num_splits, tiles_per_seq, num_sharing, tile_rows,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FORM: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PARTIAL: tl.constexpr,
    SHARED: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries. Grid (tiles, kv heads, programs that share a tile's splits; 1 without PARTIAL).
    With SHARED the grid is (num_sharing + tiles, kv heads): the first programs share the splits that `deal` has dealt
    out, and the others skip tiles with such splits.

    q, out [T, H, D]; k, v and their scales: one layer of the pool, [blocks, kv heads, tokens, ..]; query_starts,
    kv_lens, block_table: of SeqTable; tiles int32 [., 2]: sequence and first of its rows, not read if every sequence
    has tiles_per_seq > 0. sinks fp32 [H] of this layer, read with SINKS. partials fp32 [T, H, num_splits, D]: sums
    before division; stats, with a last dimension of 2: maximum, sum. With SHARED both are [items, kv heads, tile_rows,
    ..]. split_len 0: as long as needed to hold a sequence in num_splits.
    """
    kv_head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    k += kv_head.to(tl.int64) * head_stride
    v += kv_head.to(tl.int64) * head_stride
    k_scales += kv_head.to(tl.int64) * scale_head_stride
    v_scales += kv_head.to(tl.int64) * scale_head_stride
    dims = tl.arange(0, BLOCK_D)
    tile = tl.program_id(0)
    if SHARED:
        num_items = tl.where(tile < num_sharing, tl.load(items + tl.num_programs(0) - num_sharing), 0)
        for item in range(tile, num_items, num_sharing):
            owner = tl.load(owners + item)
            first_item = tl.load(items + owner)
            split = item - first_item
            seq, first_row, query_start, query_len, kv_len = _sequence(
                owner, tiles, query_starts, kv_lens, tiles_per_seq, BLOCK_M
            )
            before = kv_len - query_len
            end = before + tl.minimum(query_len, (first_row + BLOCK_M - 1) // GROUP + 1)
            tokens = (first_row + tl.arange(0, BLOCK_M)) // GROUP
            mask = (tokens < query_len)[:, None] & (dims < HEAD_DIM)[None, :]
            q_tile = _queries(
                q, query_start, first_row, kv_head, mask, q_stride, q_head_stride, GROUP, BLOCK_M, BLOCK_D
            )
            first, last = split * split_len, tl.minimum(end, (split + 1) * split_len)
            if first < last:
                maximum, total, acc = _reduce(
                    q_tile, k, v, k_scales, v_scales, block_table + seq.to(tl.int64) * table_stride, before + tokens,
                    before + first_row // GROUP + 1, first, last,
                    block_stride, token_stride, scale_block_stride, scale_token_stride, log2_scale, log2_cap, window, block_size,
                    HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, FORM, WINDOWED, CAPPED,
                )  # fmt: skip
                places = ((first_item + split).to(tl.int64) * tl.num_programs(1) + kv_head) * tile_rows + tl.arange(
                    0, BLOCK_M
                )
                tl.store(stats + 2 * places, maximum, mask=tokens < query_len)
                tl.store(stats + 2 * places + 1, total, mask=tokens < query_len)
                tl.store(partials + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        tile = tile - num_sharing
        if tile < 0:
            return
        if tl.load(items + tile) != tl.load(items + tile + 1):
            return

    seq, first_row, query_start, query_len, kv_len = _sequence(
        tile, tiles, query_starts, kv_lens, tiles_per_seq, BLOCK_M
    )
    before = kv_len - query_len  # tokens before the first query
    if split_len == 0:
        split_len = spread(kv_len, num_splits, MIN_SPLIT, BLOCK_N)
    # The tile sees [begin, end); begin is on a border of spans.
    end = before + tl.minimum(query_len, (first_row + BLOCK_M - 1) // GROUP + 1)
    whole = before + first_row // GROUP + 1
    begin = 0
    if WINDOWED:
        begin = tl.maximum(before + first_row // GROUP - window + 1, 0) // BLOCK_N * BLOCK_N
    if PARTIAL:
        if tl.program_id(2) * split_len >= end:
            return

    rows = first_row + tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    mask = (tokens < query_len)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = _queries(q, query_start, first_row, kv_head, mask, q_stride, q_head_stride, GROUP, BLOCK_M, BLOCK_D)
    table = block_table + seq.to(tl.int64) * table_stride

    if PARTIAL:
        for split in range(tl.program_id(2), (end + split_len - 1) // split_len, tl.num_programs(2)):
            first, last = tl.maximum(begin, split * split_len), tl.minimum(end, (split + 1) * split_len)
            if first < last:  # else the split is before the window
                maximum, total, acc = _reduce(
                    q_tile, k, v, k_scales, v_scales, table, before + tokens, whole, first, last,
                    block_stride, token_stride, scale_block_stride, scale_token_stride, log2_scale, log2_cap, window, block_size,
                    HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, FORM, WINDOWED, CAPPED,
                )  # fmt: skip
                places = ((query_start + tokens).to(tl.int64) * num_heads + heads) * num_splits + split
                tl.store(stats + 2 * places, maximum, mask=tokens < query_len)
                tl.store(stats + 2 * places + 1, total, mask=tokens < query_len)
                tl.store(partials + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
    else:
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:  # the sinks, which each row sees before all keys
            maximum = tl.load(sinks + heads) * TO_LOG2
            total += 1.0
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for split in range(begin // split_len * split_len, end, split_len):
            split_maximum, split_total, split_acc = _reduce(
                q_tile, k, v, k_scales, v_scales, table, before + tokens, whole,
                tl.maximum(begin, split), tl.minimum(end, split + split_len),
                block_stride, token_stride, scale_block_stride, scale_token_stride, log2_scale, log2_cap, window, block_size,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, FORM, WINDOWED, CAPPED,
            )  # fmt: skip
            maximum, kept, added = _merge(maximum, split_maximum)
            total = total * kept + split_total * added
            acc = acc * kept[:, None] + split_acc * added[:, None]
        total = tl.where(total == 0.0, 1.0, total)  # rows after the sequence's last
        places = (query_start + tokens).to(tl.int64) * out_stride + heads * HEAD_DIM
        tl.store(out + places[:, None] + dims[None, :], narrow(acc / total[:, None], out.dtype.element_ty), mask=mask)


@triton.jit
def _sequence(tile, tiles, query_starts, kv_lens, tiles_per_seq, BLOCK_M: tl.constexpr):
    """Return a tile's sequence and first row in it, and the sequence's first query, number of queries, and length."""
    if tiles_per_seq > 0:
        seq = tile // tiles_per_seq
        first_row = tile % tiles_per_seq * BLOCK_M
    else:
        seq = tl.load(tiles + 2 * tile)
        first_row = tl.load(tiles + 2 * tile + 1)
    query_start = tl.load(query_starts + seq)
    return seq, first_row, query_start, tl.load(query_starts + seq + 1) - query_start, tl.load(kv_lens + seq)


@triton.jit
def _queries(
    q, query_start, first_row, kv_head, mask, q_stride, q_head_stride,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load a tile of queries [BLOCK_M, BLOCK_D]."""
    rows = first_row + tl.arange(0, BLOCK_M)
    places = (query_start + rows // GROUP).to(tl.int64) * q_stride + (kv_head * GROUP + rows % GROUP) * q_head_stride
    return tl.load(q + places[:, None] + tl.arange(0, BLOCK_D)[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_tiles", "tiles_per_seq", "split_len", "num_sharing", "most_items"])
def deal(
    tiles, kv_lens, items, owners, num_tiles, tiles_per_seq, split_len, num_sharing, most_items,
    MIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Deal out the splits of long sequences as items that programs share: if one program would otherwise walk at least
    MIN splits and more than its share of all splits of the step. Grid (tiles), at most BLOCK.

    items int32 [tiles + 1]: the first item of each tile, which has none if the next tile's is the same; owners int32
    [most_items]: the tile of each item. Tiles whose items would exceed most_items have none.
    """
    all_tiles = tl.arange(0, BLOCK)
    there = all_tiles < num_tiles
    if tiles_per_seq > 0:
        seqs = all_tiles // tiles_per_seq
    else:
        seqs = tl.load(tiles + 2 * all_tiles, mask=there, other=0)
    counts = tl.cdiv(tl.load(kv_lens + seqs, mask=there, other=0), split_len)
    fair = tl.maximum(tl.cdiv(tl.sum(counts, 0), num_sharing), MIN)
    counts = tl.where(counts > fair, counts, 0)
    counts = tl.where(tl.cumsum(counts, 0) <= most_items, counts, 0)
    tile = tl.program_id(0)
    first = tl.sum(tl.where(all_tiles < tile, counts, 0), 0)
    count = tl.sum(tl.where(all_tiles == tile, counts, 0), 0)
    tl.store(items + tile, first)
    if tile == num_tiles - 1:
        tl.store(items + num_tiles, first + count)
    for begin in range(0, count, BLOCK):
        tl.store(owners + first + begin + all_tiles, tile, mask=begin + all_tiles < count)


@triton.jit(do_not_specialize=["window", "split_len", "num_splits", "query_len", "tiles_per_seq", "tile_rows"])
def combine(
    partials, stats, sinks, tokens, kv_lens, items, out, out_stride, window, split_len, num_splits, query_len, tiles_per_seq,
    tile_rows,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a token and head in order. Grid (tokens, heads); tokens int32 [., 5]: row in the batch,
    position, length of its sequence, its place among the sequence's new tokens, and the sequence's first tile; not read
    if every sequence has query_len > 0 tokens. SHARED: as in `attend`; tiles without items are skipped."""
    head = tl.program_id(1)
    if query_len > 0:
        row = tl.program_id(0)
        index = row % query_len
        first_tile = row // query_len * tiles_per_seq
        kv_len = tl.load(kv_lens + row // query_len)
        position = kv_len - query_len + index
    else:
        token = tokens + 5 * tl.program_id(0)
        row = tl.load(token)
        position = tl.load(token + 1)
        kv_len = tl.load(token + 2)
        index = tl.load(token + 3)
        first_tile = tl.load(token + 4)
    if position < 0:  # padding
        return
    if split_len == 0:
        split_len = spread(kv_len, num_splits, MIN_SPLIT, BLOCK_N)
    first = 0
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0) // split_len
    dims = tl.arange(0, BLOCK_D)
    if SHARED:
        tile = first_tile + (index * GROUP + head % GROUP) // BLOCK_M
        item = tl.load(items + tile)
        if item == tl.load(items + tile + 1):
            return
        stride = tl.num_programs(1) // GROUP * tile_rows
        place = item.to(tl.int64) * stride + head // GROUP * tile_rows + (index * GROUP + head % GROUP) % BLOCK_M
    else:
        stride = 1
        place = (row.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if SINKS:
        maximum = tl.zeros([1], tl.float32) + tl.load(sinks + head) * TO_LOG2
        total += 1.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    end = position // split_len + 1
    for group in range(first, end, GROUP_LOADS):
        # None of these loads waits for another; their results are merged as in `attend`, one by one.
        for offset in tl.static_range(GROUP_LOADS):
            there = group + offset < end
            split = place + tl.minimum(group + offset, end - 1) * stride
            split_acc = tl.load(partials + split * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
            split_total = tl.load(stats + 2 * split + 1)
            maximum, kept, added = _merge(maximum, tl.where(there, tl.load(stats + 2 * split), float("-inf")))
            total = tl.where(there, total * kept + split_total * added, total)
            acc = tl.where(there, acc * kept + split_acc * added, acc)
    result = narrow(acc / total, out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * out_stride + head * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)


@triton.jit
def spread(kv_len, num_splits, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the positions per split: whole spans, as few as hold a sequence in num_splits, at least MIN_SPLIT."""
    return tl.maximum(tl.cdiv(tl.cdiv(kv_len, num_splits), BLOCK_N) * BLOCK_N, MIN_SPLIT)


@triton.jit
def _reduce(
    q, k, v, k_scales, v_scales, table, positions, whole, begin, end,
    block_stride, token_stride, scale_block_stride, scale_token_stride, log2_scale, log2_cap, window, block_size,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FORM: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Reduce positions [begin, end) for rows at `positions` [M]: return maximum [M] (of base-2 scores), sum [M], sums
    [M, D]. Every row sees the positions below `whole`, apart from a window."""
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    middle = begin
    if not WINDOWED:
        middle = tl.maximum(begin, tl.minimum(whole, end) // BLOCK_N * BLOCK_N)
    for start in range(begin, middle, BLOCK_N):
        maximum, total, acc = _span(
            maximum, total, acc, q, k, v, k_scales, v_scales, table, positions, start, end,
            block_stride, token_stride, scale_block_stride, scale_token_stride, log2_scale, log2_cap, window, block_size,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, FORM, False, CAPPED, False,
        )  # fmt: skip
    for start in range(middle, end, BLOCK_N):
        maximum, total, acc = _span(
            maximum, total, acc, q, k, v, k_scales, v_scales, table, positions, start, end,
            block_stride, token_stride, scale_block_stride, scale_token_stride, log2_scale, log2_cap, window, block_size,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, FORM, WINDOWED, CAPPED, True,
        )  # fmt: skip
    return maximum, total, acc


@triton.jit
def _span(
    maximum, total, acc, q, k, v, k_scales, v_scales, table, positions, start, end,
    block_stride, token_stride, scale_block_stride, scale_token_stride, log2_scale, log2_cap, window, block_size,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FORM: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Reduce BLOCK_N positions from `start` on. Without MASKED all of them exist and every row sees them."""
    keys = start + tl.arange(0, BLOCK_N)
    there = keys < end
    block_ids = tl.load(table + keys // block_size, mask=there, other=0).to(tl.int64)
    offsets = block_ids * block_stride + (keys % block_size) * token_stride
    scale_offsets = block_ids * scale_block_stride + (keys % block_size) * scale_token_stride
    k_tile = load_rows(k, k_scales, offsets, scale_offsets, there, HEAD_DIM, BLOCK_D, FORM, q.dtype, MASKED)
    scores = dot(q, tl.trans(k_tile), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * log2_scale
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), bounded where it is one already
        scores = log2_cap * (1.0 - 2.0 / (tl.exp2(tl.minimum(scores, 126.0)) + 1.0))
    if MASKED:
        seen = (keys[None, :] <= positions[:, None]) & there[None, :]
        if WINDOWED:
            seen = seen & (positions[:, None] - keys[None, :] < window)
        scores = tl.where(seen, scores, float("-inf"))
    maximum, kept, _ = _merge(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - tl.where(maximum == float("-inf"), 0.0, maximum)[:, None])
    total = total * kept + tl.sum(weights, 1)
    v_tile = load_rows(v, v_scales, offsets, scale_offsets, there, HEAD_DIM, BLOCK_D, FORM, q.dtype, MASKED)
    return maximum, total, dot(narrow(weights, q.dtype), v_tile, acc * kept[:, None])


@triton.jit
def _merge(maximum, other):
    """Return the larger of two maxima, and the factors on sums that were taken under each. -inf has seen nothing:
    factor 0."""
    larger = tl.maximum(maximum, other)
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    return larger, tl.exp2(maximum - finite), tl.exp2(other - finite)
