"""Compute recurrences over whole sequences, token by token, in place in their state blocks. Prompts and decode use the
same operations in the same order, so a token has the same bits wherever a chunk begins. The torch twins are
recurrent/mamba2.py, delta_net.py and mamba.py.

A program holds some rows of one state in registers over all inputs of a sequence; the next input is read while the
current one is folded. `inputs` and the table of sequences are those of inputs.py; y fp32 [T, inner]. CHUNK: inputs in
whole chunks (chunks.py) are folded already; 0: none are.
"""

import triton
import triton.language as tl

from baton.engine.kernels.state.chunks import num_chunked
from baton.engine.kernels.state.inputs import STATE_FIELDS, sequence
from baton.engine.kernels.state.softplus import softplus


@triton.jit
def _store_row(y, row, places, values, mask, query_starts, repeats, inner):
    """Store the outputs of row `row`, and of the rows of padding that repeat it."""
    tl.store(y + row * inner + places, values, mask=mask)
    num_seqs = tl.num_programs(0)
    for each in range(num_seqs - repeats, num_seqs):
        moved = tl.load(query_starts + each) - tl.load(query_starts + tl.program_id(0))
        tl.store(y + (row + moved) * inner + places, values, mask=mask)


@triton.jit(do_not_specialize=["last_state", "least_step", "largest_step"])
def fold_mamba2(
    inputs, step_bias, decay, skip, states, y, table, query_starts, kv_lens,
    last_state, state_stride, first_element, num_heads, heads_each, head_dim, state_size, width, inner, least_step, largest_step,
    EXTRA: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold Mamba-2: state = state exp(dt A) + (dt x) B, y = state C + D x. Inputs are x, B and C of groups of
    `heads_each` heads, dt. states: of this layer, fp32; a state [heads, head_dim, state_size] begins at `first_element`
    of a block. Grid (sequences, heads, blocks of a head's rows)."""
    state, pending, total, kept, first_input, first_row, context = sequence(table, query_starts, kv_lens, EXTRA)
    if state < 0:
        return
    repeats, done = tl.load(table + tl.program_id(0) * STATE_FIELDS + 3), 0
    if CHUNK > 0:
        done = num_chunked(pending, total, kept, context, CHUNK)
    if done == total:
        return
    head = tl.program_id(1)
    dims, sizes = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    dim_mask, size_mask = dims < head_dim, sizes < state_size
    own = states + (last_state - state).to(tl.int64) * state_stride + first_element
    own += (head * head_dim + dims)[:, None] * state_size + sizes[None, :]
    mask = dim_mask[:, None] & size_mask[None, :]
    current = tl.load(own, mask=mask & (context + done > 0), other=0.0)
    bias, rate, through = tl.load(step_bias + head), tl.load(decay + head), tl.load(skip + head)
    places = head * head_dim + dims
    written = inner + head // heads_each * state_size + sizes
    read = written + num_heads // heads_each * state_size
    steps = width - num_heads + head
    row = inputs + (first_input + done) * width
    x = tl.load(row + places, mask=dim_mask, other=0.0)
    b, c = tl.load(row + written, mask=size_mask, other=0.0), tl.load(row + read, mask=size_mask, other=0.0)
    raw = tl.load(row + steps)
    for index in range(done, total):
        row += width
        more = index + 1 < total
        next_x = tl.load(row + places, mask=dim_mask & more, other=0.0)
        next_b = tl.load(row + written, mask=size_mask & more, other=0.0)
        next_c = tl.load(row + read, mask=size_mask & more, other=0.0)
        next_raw = tl.load(row + steps, mask=more, other=0.0)
        step = tl.minimum(tl.maximum(softplus(raw + bias), least_step), largest_step)
        current = tl.fma((step * x)[:, None], b[None, :], current * tl.exp(step * rate))
        out = tl.fma(through, x, tl.sum(current * c[None, :], 1))
        if index >= pending:
            _store_row(y, first_row + index - pending, places, out, dim_mask, query_starts, repeats, inner)
        if index + 1 == kept:
            tl.store(own, current, mask=mask)
        x, b, c, raw = next_x, next_b, next_c, next_raw


@triton.jit(do_not_specialize=["last_state"])
def fold_delta_net(
    inputs, step_bias, decay, states, y, table, query_starts, kv_lens,
    last_state, state_stride, first_element, num_heads, heads_each, num_keys, key_dim, value_dim, width, inner,
    EXTRA: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Fold the gated delta rule: state = g state, state = state + k (b (v - k state)), y = q state. Inputs are q and k
    [num_keys] each, one head of them for `heads_each` heads of values, v, then how much each head writes, and each
    head's raw step. A state [heads, key_dim, value_dim] begins at `first_element`. Grid (sequences, heads, blocks of a
    head's values)."""
    state, pending, total, kept, first_input, first_row, context = sequence(table, query_starts, kv_lens, EXTRA)
    if state < 0:
        return
    repeats, done = tl.load(table + tl.program_id(0) * STATE_FIELDS + 3), 0
    if CHUNK > 0:
        done = num_chunked(pending, total, kept, context, CHUNK)
    if done == total:
        return
    head = tl.program_id(1)
    keys, dims = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_mask, dim_mask = keys < key_dim, dims < value_dim
    own = states + (last_state - state).to(tl.int64) * state_stride + first_element
    own += (head * key_dim + keys)[:, None] * value_dim + dims[None, :]
    mask = key_mask[:, None] & dim_mask[None, :]
    current = tl.load(own, mask=mask & (context + done > 0), other=0.0)
    bias, rate = tl.load(step_bias + head), tl.load(decay + head)
    places = head * value_dim + dims
    queries = head // heads_each * key_dim + keys
    row = inputs + (first_input + done) * width
    query, key = (tl.load(row + queries, mask=key_mask, other=0.0),
                  tl.load(row + num_keys + queries, mask=key_mask, other=0.0))  # fmt: skip
    value = tl.load(row + 2 * num_keys + places, mask=dim_mask, other=0.0)
    scalars = width - 2 * num_heads + head
    written, raw = tl.load(row + scalars), tl.load(row + scalars + num_heads)
    for index in range(done, total):
        row += width
        more = index + 1 < total
        next_query = tl.load(row + queries, mask=key_mask & more, other=0.0)
        next_key = tl.load(row + num_keys + queries, mask=key_mask & more, other=0.0)
        next_value = tl.load(row + 2 * num_keys + places, mask=dim_mask & more, other=0.0)
        next_written = tl.load(row + scalars, mask=more, other=0.0)
        next_raw = tl.load(row + scalars + num_heads, mask=more, other=0.0)
        current = current * tl.exp(softplus(raw + bias) * rate)
        known = tl.sum(current * key[:, None], 0)
        change = (value - known) * (1.0 / (1.0 + tl.exp(-written)))
        current = tl.fma(key[:, None], change[None, :], current)
        out = tl.sum(current * query[:, None], 0)
        if index >= pending:
            _store_row(y, first_row + index - pending, places, out, dim_mask, query_starts, repeats, inner)
        if index + 1 == kept:
            tl.store(own, current, mask=mask)
        query, key, value, written, raw = next_query, next_key, next_value, next_written, next_raw


@triton.jit(do_not_specialize=["last_state"])
def fold_mamba(
    inputs, steps, selected_b, selected_c, decay, skip, states, y, table, query_starts, kv_lens,
    last_state, state_stride, first_element, state_size, inner,
    EXTRA: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Fold Mamba: state = state exp(dt A) + (dt x) B, y = state C + D x, each channel by itself. Every input has x
    [inner], raw steps [inner], and what is written and read, fp32 [state_size]; decay fp32 [state_size, inner]. A state
    [state_size, inner] begins at `first_element`. Grid (sequences, blocks of channels)."""
    state, pending, total, kept, first_input, first_row, context = sequence(table, query_starts, kv_lens, EXTRA)
    if state < 0:
        return
    repeats = tl.load(table + tl.program_id(0) * STATE_FIELDS + 3)
    sizes, places = tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    size_mask, place_mask = sizes < state_size, places < inner
    mask = size_mask[:, None] & place_mask[None, :]
    offsets = sizes[:, None] * inner + places[None, :]
    own = states + (last_state - state).to(tl.int64) * state_stride + first_element + offsets
    current = tl.load(own, mask=mask & (context > 0), other=0.0)
    rates = tl.load(decay + offsets, mask=mask, other=0.0)
    through = tl.load(skip + places, mask=place_mask, other=0.0)
    at, small = first_input * inner + places, first_input * state_size + sizes
    x, raw = (tl.load(inputs + at, mask=place_mask, other=0.0), tl.load(steps + at, mask=place_mask, other=0.0))
    b, c = (tl.load(selected_b + small, mask=size_mask, other=0.0),
            tl.load(selected_c + small, mask=size_mask, other=0.0))  # fmt: skip
    for index in range(total):
        at += inner
        small += state_size
        more = index + 1 < total
        next_x = tl.load(inputs + at, mask=place_mask & more, other=0.0)
        next_raw = tl.load(steps + at, mask=place_mask & more, other=0.0)
        next_b = tl.load(selected_b + small, mask=size_mask & more, other=0.0)
        next_c = tl.load(selected_c + small, mask=size_mask & more, other=0.0)
        step = softplus(raw.to(tl.float32))
        current = tl.fma((step * x)[None, :], b[:, None], current * tl.exp(step[None, :] * rates))
        out = tl.fma(through, x, tl.sum(current * c[:, None], 0))
        if index >= pending:
            _store_row(y, first_row + index - pending, places, out, place_mask, query_starts, repeats, inner)
        if index + 1 == kept:
            tl.store(own, current, mask=mask)
        x, raw, b, c = next_x, next_raw, next_b, next_c
