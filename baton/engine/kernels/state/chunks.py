"""Compute recurrences in chunks of a fixed number of tokens, as products of matrices: for prompts, if a token need not
have the bits that it has in decode. Mamba-2 by arXiv 2405.21060, the gated delta rule by arXiv 2412.06464.

Rows of a sequence that begin at a multiple of CHUNK are computed in whole chunks; the rest of them is folded
afterwards, token by token (folds.py). So a token's bits do not depend on what else is in its step, nor on how a prompt
was divided at multiples of CHUNK. Products use tf32, which has more bits than the bf16 rows of which the inputs are
made. Decays are exponentials of sums over the tokens between, never above 0.
"""

import triton
import triton.language as tl

from baton.engine.kernels.state.inputs import sequence
from baton.engine.kernels.state.softplus import softplus


@triton.jit
def num_chunked(pending, total, kept, context, CHUNK: tl.constexpr):
    """Return how many of a sequence's inputs, from the first on, are computed in chunks."""
    goes = (pending == 0) & (kept == total) & (context % CHUNK == 0)
    return tl.where(goes, total // CHUNK * CHUNK, 0)


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="tf32")


@triton.jit
def _between(sums, MIN: tl.constexpr, CHUNK: tl.constexpr):
    """Return how much is left at token t of what token j wrote, [t, j], for t - j >= MIN, else 0."""
    tokens = tl.arange(0, CHUNK)
    behind = tokens[:, None] - tokens[None, :] >= MIN
    return tl.exp(tl.where(behind, sums[:, None] - sums[None, :], float("-inf")))


@triton.jit
def _last(sums, CHUNK: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, sums, 0.0), 0)


@triton.jit(do_not_specialize=["last_state", "least_step", "largest_step"])
def scan_mamba2(
    inputs, step_bias, decay, skip, states, y, table, query_starts, kv_lens,
    last_state, state_stride, first_element, num_heads, heads_each, head_dim, state_size, width, inner, least_step, largest_step,
    EXTRA: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scan whole chunks of Mamba-2; arguments as in fold_mamba2."""
    state, pending, total, kept, first_input, first_row, context = sequence(table, query_starts, kv_lens, EXTRA)
    if state < 0:
        return
    end = num_chunked(pending, total, kept, context, CHUNK)
    if end == 0:
        return
    head, tokens = tl.program_id(1), tl.arange(0, CHUNK)
    dims, sizes = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    dim_mask, size_mask = (dims < head_dim)[None, :], (sizes < state_size)[None, :]
    own = states + (last_state - state).to(tl.int64) * state_stride + first_element
    own += (head * head_dim + dims)[:, None] * state_size + sizes[None, :]
    mask = (dims < head_dim)[:, None] & size_mask
    current = tl.load(own, mask=mask & (context > 0), other=0.0)
    bias, rate, through = tl.load(step_bias + head), tl.load(decay + head), tl.load(skip + head)
    places = head * head_dim + dims
    written = inner + head // heads_each * state_size + sizes
    read = written + num_heads // heads_each * state_size
    at, to = tokens * width, tokens[:, None] * inner + places[None, :]
    for begin in range(0, end, CHUNK):
        rows = inputs + (first_input + begin) * width
        x = tl.load(rows + at[:, None] + places[None, :], mask=dim_mask, other=0.0)
        b = tl.load(rows + at[:, None] + written[None, :], mask=size_mask, other=0.0)
        c = tl.load(rows + at[:, None] + read[None, :], mask=size_mask, other=0.0)
        raw = tl.load(rows + at + width - num_heads + head)
        step = tl.minimum(tl.maximum(softplus(raw + bias), least_step), largest_step)
        sums = tl.cumsum(step * rate, 0)
        seen = _product(c, tl.trans(b)) * _between(sums, 0, CHUNK) * step[None, :]
        out = _product(seen, x) + _product(c, tl.trans(current)) * tl.exp(sums)[:, None] + x * through
        last = _last(sums, CHUNK)
        current = current * tl.exp(last) + _product(tl.trans(x * (tl.exp(last - sums) * step)[:, None]), b)
        tl.store(y + (first_row + begin) * inner + to, out, mask=dim_mask)
    tl.store(own, current, mask=mask)


@triton.jit
def _decays(scalars, num_heads, bias, rate):
    """Return how much each of a chunk's tokens writes, and the sums of the logarithms of what is kept."""
    written, raw = tl.load(scalars), tl.load(scalars + num_heads)
    return 1.0 / (1.0 + tl.exp(-written)), tl.cumsum(softplus(raw + bias) * rate, 0)


@triton.jit
def prepare_delta_net(
    inputs, step_bias, decay, solved, table, query_starts, kv_lens,
    num_heads, heads_each, num_keys, key_dim, width, EXTRA: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Prepare the changes of each chunk: u = b (v - k state), with earlier changes of the chunk in the state, equals (1
    + A)^-1 b (v - k state before), A below its diagonal. solved fp32 [T, heads, CHUNK]: (1 + A)^-1 b, a row for each
    token. Grid (sequences, heads, chunks of the longest)."""
    state, pending, total, kept, first_input, first_row, context = sequence(table, query_starts, kv_lens, EXTRA)
    begin = tl.program_id(2) * CHUNK
    if state < 0:
        return
    if begin >= num_chunked(pending, total, kept, context, CHUNK):
        return
    head, tokens, keys = tl.program_id(1), tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    rows, at = inputs + (first_input + begin) * width, tokens * width
    own_keys = num_keys + head // heads_each * key_dim + keys
    key = tl.load(rows + at[:, None] + own_keys[None, :], mask=(keys < key_dim)[None, :], other=0.0)
    bias, rate = tl.load(step_bias + head), tl.load(decay + head)
    written, sums = _decays(rows + at + width - 2 * num_heads + head, num_heads, bias, rate)
    known = _product(key, tl.trans(key)) * _between(sums, 1, CHUNK) * written[:, None]
    inverse = tl.where(tokens[:, None] == tokens[None, :], 1.0, 0.0)
    for token in range(1, CHUNK):
        is_own = tokens[:, None] == token
        of_own = tl.sum(tl.where(is_own, known, 0.0), 0)
        inverse = tl.where(is_own, inverse - tl.sum(of_own[:, None] * inverse, 0)[None, :], inverse)
    to = (tokens[:, None] * num_heads + head) * CHUNK + tokens[None, :]
    tl.store(solved + (first_row + begin) * num_heads * CHUNK + to, inverse * written[None, :])


@triton.jit(do_not_specialize=["last_state"])
def scan_delta_net(
    inputs, step_bias, decay, solved, states, y, table, query_starts, kv_lens,
    last_state, state_stride, first_element, num_heads, heads_each, num_keys, key_dim, value_dim, width, inner,
    EXTRA: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Scan whole chunks of the gated delta rule; arguments as in fold_delta_net, and solved from prepare_delta_net."""
    state, pending, total, kept, first_input, first_row, context = sequence(table, query_starts, kv_lens, EXTRA)
    if state < 0:
        return
    end = num_chunked(pending, total, kept, context, CHUNK)
    if end == 0:
        return
    head, tokens = tl.program_id(1), tl.arange(0, CHUNK)
    keys, dims = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_mask, dim_mask = (keys < key_dim)[None, :], (dims < value_dim)[None, :]
    own = states + (last_state - state).to(tl.int64) * state_stride + first_element
    own += (head * key_dim + keys)[:, None] * value_dim + dims[None, :]
    mask = (keys < key_dim)[:, None] & dim_mask
    current = tl.load(own, mask=mask & (context > 0), other=0.0)
    bias, rate = tl.load(step_bias + head), tl.load(decay + head)
    places = head * value_dim + dims
    queries = head // heads_each * key_dim + keys
    at, to = tokens * width, tokens[:, None] * inner + places[None, :]
    of_solved = (tokens[:, None] * num_heads + head) * CHUNK + tokens[None, :]
    for begin in range(0, end, CHUNK):
        rows = inputs + (first_input + begin) * width
        query = tl.load(rows + at[:, None] + queries[None, :], mask=key_mask, other=0.0)
        key = tl.load(rows + num_keys + at[:, None] + queries[None, :], mask=key_mask, other=0.0)
        value = tl.load(rows + 2 * num_keys + at[:, None] + places[None, :], mask=dim_mask, other=0.0)
        _, sums = _decays(rows + at + width - 2 * num_heads + head, num_heads, bias, rate)
        solve = tl.load(solved + (first_row + begin) * num_heads * CHUNK + of_solved)
        since = tl.exp(sums)[:, None]
        change = _product(solve, value - _product(key, current) * since)
        seen = _product(query, tl.trans(key)) * _between(sums, 0, CHUNK)
        out = _product(query, current) * since + _product(seen, change)
        last = _last(sums, CHUNK)
        current = current * tl.exp(last) + _product(tl.trans(key * tl.exp(last - sums)[:, None]), change)
        tl.store(y + (first_row + begin) * inner + to, out, mask=dim_mask)
    tl.store(own, current, mask=mask)
