"""The inputs of the recurrence of a layer with a state: rows after the short convolution, and the scalars beside them.

Each sequence of a step has a row in the table int32 [S, STATE_FIELDS]: its state block, -1 for padding; the accepted
proposals of the last step, which are folded in first; the proposals at its end; and how many sequences at the end of
the table are padding that repeats it. Its inputs are the pending proposals, from `drafts`, then its rows. They are
numbered from 0, and the state is kept after `kept` of them. The recurrence's kernels (folds.py) read them as rows
[inputs of a step, channels and scalars]; those of sequence s begin at row query_starts[s] + s * EXTRA.
"""

import triton
import triton.language as tl

STATE_FIELDS = tl.constexpr(4)


@triton.jit
def sequence(table, query_starts, kv_lens, EXTRA: tl.constexpr):
    """Return for the program's sequence: its block, its pending proposals, its inputs, how many of them are kept, the
    row of its first input, its first row in the step, and the tokens before that row, if any."""
    seq = tl.program_id(0)
    own = table + seq * STATE_FIELDS
    state, pending, drafts = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    start = tl.load(query_starts + seq)
    num_rows = tl.load(query_starts + seq + 1) - start
    context = tl.load(kv_lens + seq) - num_rows
    total = pending + num_rows
    return state, pending, total, total - drafts, (start + seq * EXTRA).to(tl.int64), start.to(tl.int64), context


@triton.jit
def _inputs(rows, drafts, tail, index, places, mask, pending, num_channels, row_stride, draft_stride, context,
            TAPS: tl.constexpr, DRAFTS: tl.constexpr):  # fmt: skip
    """Load inputs `index` [N, 1], from -(TAPS - 1) on, at `places` [1, M], fp32 [N, M]: those below 0 from the tail,
    pending ones from drafts, others from rows."""
    known = mask & (index >= pending)
    found = tl.load(rows + (index - pending).to(tl.int64) * row_stride + places, mask=known, other=0.0).to(tl.float32)
    before = mask & (index < 0) & (places < num_channels) & (context > 0)
    found = tl.where(
        index < 0, tl.load(tail + (index + TAPS - 1) * num_channels + places, mask=before, other=0.0), found
    )
    if DRAFTS:
        proposed = mask & (index >= 0) & (index < pending)
        found = tl.where(proposed, tl.load(drafts + index * draft_stride + places, mask=proposed, other=0.0), found)
    return found


@triton.jit(do_not_specialize=["last_state", "norm_eps", "query_scale"])
def convolve(
    rows, weight, bias, states, drafts, out, table, query_starts, kv_lens,
    last_state, state_stride, drafts_stride, row_stride, first, num_channels, num_scalars, norm_eps, query_scale,
    TAPS: tl.constexpr, EXTRA: tl.constexpr, NUM_NORMED: tl.constexpr, NORM_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute inputs of a recurrence, fp32: channels [first, first + num_channels) of projected rows after convolution
    and SiLU, and the scalars after them unchanged. Tails are moved on, and inputs of proposals are kept in `drafts`.

    weight fp32 [TAPS, num_channels], oldest tap first; states and drafts: of this layer, fp32, block `last_state`
    first; drafts [.., .., channels and scalars]; out as the module says. The first NUM_NORMED parts of NORM_SIZE
    channels are normed to length one, and their first half is also multiplied by `query_scale`. EXTRA 0: there are no
    proposals. Grid (sequences, parts).
    """
    state, pending, total, kept, first_input, first_row, context = sequence(table, query_starts, kv_lens, EXTRA)
    if state < 0:
        return
    part, width = tl.program_id(1), num_channels + num_scalars
    lanes = tl.arange(0, BLOCK)
    if NUM_NORMED > 0 and part < NUM_NORMED:
        channels = part * NORM_SIZE + lanes
        mask = lanes < NORM_SIZE
    else:
        channels = NUM_NORMED * NORM_SIZE + (part - NUM_NORMED) * BLOCK + lanes
        mask = channels < width
    block = (last_state - state).to(tl.int64)
    tail = states + block * state_stride
    own_drafts = drafts
    if EXTRA > 0:
        own_drafts = drafts + block * drafts_stride
    own_rows = rows + first_row * row_stride + first
    places, mask = channels[None, :], mask[None, :]
    convolved = mask & (places < num_channels)
    offset = tl.zeros([1, BLOCK], tl.float32)
    if bias is not None:
        offset = tl.load(bias + places, mask=convolved, other=0.0)
    for begin in range(0, total, BLOCK_T):
        index = (begin + tl.arange(0, BLOCK_T))[:, None]
        taken = mask & (index < total)
        row = tl.zeros([BLOCK_T, BLOCK], tl.float32) + offset
        raw = row
        for tap in tl.static_range(TAPS):
            raw = _inputs(own_rows, own_drafts, tail, index - (TAPS - 1) + tap, places, taken, pending, num_channels,
                          row_stride, width, context, TAPS, EXTRA > 0)  # fmt: skip
            row = tl.fma(raw, tl.load(weight + tap * num_channels + places, mask=convolved, other=0.0), row)
        row = tl.where(places < num_channels, row / (1.0 + tl.exp(-row)), raw)
        if NUM_NORMED > 0 and part < NUM_NORMED:
            row = tl.where(mask, row, 0.0)
            row = row * (1.0 / tl.sqrt(tl.sum(row * row, 1) + norm_eps))[:, None]
            if part * 2 < NUM_NORMED:
                row = row * query_scale
        tl.store(out + (first_input + index) * width + places, row, mask=taken)
    tl.debug_barrier()  # other threads have read the tail and the drafts, which are written now
    for tap in tl.static_range(TAPS - 1):
        index = tl.full([1, 1], tap - (TAPS - 1), tl.int32) + kept
        moved = _inputs(own_rows, own_drafts, tail, index, places, convolved, pending, num_channels, row_stride, width,
                        context, TAPS, EXTRA > 0)  # fmt: skip
        tl.debug_barrier()
        tl.store(tail + tap * num_channels + places, moved, mask=convolved)
    if EXTRA > 0:
        for index in range(kept, total):
            row = tl.load(own_rows + (index - pending).to(tl.int64) * row_stride + places, mask=mask, other=0.0)
            tl.store(own_drafts + (index - kept) * width + places, row.to(tl.float32), mask=mask)
