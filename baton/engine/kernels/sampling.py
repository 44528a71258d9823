"""Draw tokens from logits in two launches: penalties, biases, bans, masks, temperature, top_k, top_p, min_p and noise.

`score` takes a row's vocabulary in parts: it changes logits and leaves the best token of each part or, if a row has
filters, its scores. `choose` finishes a row: it takes the best of the parts, or of what the filters leave. Each row has
its own program, and all sums for a filter are of whole numbers, so a token does not depend on other rows or on the
order of sums.

The cut of a filter is found without sorting: a histogram of how far scores are below the best tells which tokens may be
left, these are moved together, and the cut among them is found by halving. Scores are compared as integers of the same
order. The twin on a host is sampling/filters.py.

Noise is compared in fp64 where it decides. In fp32, relative to the best score, noise and score are right within 1e-4:
a token that is 1e-3 below the best such sum cannot be the one that is drawn, and is not computed again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 2048  # tokens of a vocabulary per program of `score`
ROW_BLOCK, ROW_WARPS = 4096, 16  # tokens that a program of `choose` takes together

# Words of a row's record, int32; fp32 values as their bits.
RECORD = tl.constexpr(16)
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(place) for place in range(6))
MODE, TOP_K, KEY_LOW, KEY_HIGH, FIRST_CHANGE, END_CHANGE, MASK, SLOT = (tl.constexpr(place) for place in range(6, 14))
GREEDY, PLAIN, FILTERED = (tl.constexpr(mode) for mode in range(3))
CHANGE = tl.constexpr(3)  # words of a changed token: id, times in the output with SEEN, fp32 to add
SEEN = tl.constexpr(1 << 30)

NEAR = tl.constexpr(1e-3)
NO_ID = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-2139095041)  # `_ordered` of -inf
BINS, BINS_PER_UNIT = tl.constexpr(2048), tl.constexpr(128.0)
HAIR = tl.constexpr(1e-4)  # the most by which the sum of a histogram's lower bounds may be wrong
WHOLE = tl.constexpr(float(1 << 40))  # the weight of the best token
GOLDEN, MIX_1, MIX_2 = (tl.constexpr(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def draw(logits: Tensor, given: Tensor, num_slots: int) -> Tensor:
    """Return token ids int64 [R] of logits fp32 [R, vocab_size], rows contiguous. `given`, int32 on the same device,
    has RECORD words per row, then what they point to (sampling/on_device.py). `num_slots`: rows with changes or
    filters, whose scores are kept in between."""
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, PART)
    device = logits.device
    scores = torch.empty(num_slots, vocab_size, dtype=torch.float32, device=device)
    ids = torch.empty(num_slots, vocab_size, dtype=torch.int32, device=device)
    best = torch.empty(num_rows, num_parts, dtype=torch.float64, device=device)
    best_ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    score[(num_rows, num_parts)](
        logits, given, scores, best, best_ids, logits.stride(0), vocab_size, BLOCK=PART, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
    choose[(num_rows,)](
        given, scores, ids, best, best_ids, token_ids, vocab_size, num_parts,
        PARTS=triton.next_power_of_2(num_parts), BLOCK=ROW_BLOCK, num_warps=ROW_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return token_ids


@triton.jit(do_not_specialize_on_alignment=["logits"])
def score(logits, given, scores, best, best_ids, row_stride, vocab_size, BLOCK: tl.constexpr):
    """Score one part of a row. Grid (rows, parts of the vocabulary). best fp64 and best_ids [rows, parts]: the best
    token of each part and its score, with noise if it is drawn without filters. scores [slots, vocab_size]: of rows
    with filters."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record = given + row * RECORD
    ids = part * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab_size
    raw = logits + row * row_stride
    kept = scores + tl.load(record + SLOT).to(tl.int64) * vocab_size
    tile = tl.load(raw + ids, mask=mask, other=float("-inf"))
    begin, end = tl.load(record + FIRST_CHANGE), tl.load(record + END_CHANGE)
    if begin < end:
        tl.store(kept + ids, tile, mask=mask)
        tl.debug_barrier()
        for change in range(begin, end, CHANGE * BLOCK):
            _change(raw, kept, given, record, change + CHANGE * tl.arange(0, BLOCK), end, part * BLOCK, BLOCK)
        tl.debug_barrier()
        tile = tl.load(kept + ids, mask=mask, other=float("-inf"))
    masks = tl.load(record + MASK)
    if masks >= 0:
        words = tl.load(given + masks + ids // 32, mask=mask, other=0)
        tile = tl.where(((words >> (ids % 32)) & 1) == 0, float("-inf"), tile)
    tile = tl.div_rn(tile, _float(record + TEMPERATURE))
    highest = tl.max(tile, 0)
    top, token = highest.to(tl.float64), tl.min(tl.where(tile == highest, ids, NO_ID), 0)
    mode = tl.load(record + MODE)
    if mode == PLAIN:
        top, token = _best(tile, ids, _key(record), _finite(highest), tl.full([], float("-inf"), tl.float64), token)
    if mode == FILTERED:
        tl.store(kept + ids, tile, mask=mask)
    place = row * tl.num_programs(1) + part
    tl.store(best + place, top)
    tl.store(best_ids + place, token)


@triton.jit
def _change(raw, kept, given, record, places, end, first, BLOCK: tl.constexpr):
    """Write the logits of changed tokens [first, first + BLOCK), each of which is named once."""
    there = places < end
    ids = tl.load(given + places, mask=there, other=-1)
    mine = (ids >= first) & (ids < first + BLOCK)
    times = tl.load(given + places + 1, mask=mine, other=0)
    added = tl.load(given + places + 2, mask=mine, other=0).to(tl.float32, bitcast=True)
    values = tl.load(raw + ids, mask=mine, other=0.0)
    repetition = _float(record + REPETITION)
    penalized = tl.where(values < 0.0, values * repetition, tl.div_rn(values, repetition))
    values = tl.where(times >= SEEN, penalized, values)
    count = tl.where(times >= SEEN, times - SEEN, times).to(tl.float32)
    penalty = _float(record + PRESENCE) + _float(record + FREQUENCY) * count
    values = tl.where(count > 0.0, values - penalty, values)
    tl.store(kept + ids, values + added, mask=mine)


@triton.jit
def choose(
    given, scores, ids, best, best_ids, token_ids, vocab_size, num_parts, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Choose the token of a row. Grid (rows). token_ids int64 [rows]; ids int32, shaped as scores: the tokens that may
    be left, whose scores are moved to the same places."""
    row = tl.program_id(0).to(tl.int64)
    record = given + row * RECORD
    parts = tl.arange(0, PARTS)
    mask = parts < num_parts
    tops = tl.load(best + row * num_parts + parts, mask=mask, other=float("-inf"))
    found = tl.load(best_ids + row * num_parts + parts, mask=mask, other=NO_ID)
    top = tl.max(tops, 0)
    token = tl.min(tl.where(tops == top, found, NO_ID), 0)
    if tl.load(record + MODE) == FILTERED:
        kept = tl.load(record + SLOT).to(tl.int64) * vocab_size
        token = _filtered(scores + kept, ids + kept, record, _finite(top.to(tl.float32)), token, vocab_size, BLOCK)
    tl.store(token_ids + row, tl.minimum(token, vocab_size - 1).to(tl.int64))


@triton.jit
def _filtered(scores, ids, record, highest, token, vocab_size, BLOCK: tl.constexpr):
    """Draw a token from those that the filters of a row leave; `highest`: its best score."""
    top_k, top_p, min_p = tl.load(record + TOP_K), _float(record + TOP_P), _float(record + MIN_P)
    lanes = tl.arange(0, BLOCK)
    histogram = tl.zeros([BINS], tl.int32)
    masses = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, vocab_size, BLOCK):
        tile = tl.load(scores + begin + lanes, mask=begin + lanes < vocab_size, other=float("-inf"))
        histogram += tl.histogram(_bin(tile, highest), BINS)
        masses += _weight(tile, highest)
    mass = tl.sum(masses, 0)
    last = _last_bin(histogram, mass, top_k, top_p, min_p)

    count = 0
    for begin in range(0, vocab_size, BLOCK):
        tile = tl.load(scores + begin + lanes, mask=begin + lanes < vocab_size, other=float("-inf"))
        left = (_bin(tile, highest) <= last) & (tile > float("-inf"))
        places = count + tl.cumsum(left.to(tl.int32), 0) - 1
        tl.debug_barrier()  # all have read before any writes
        tl.store(scores + places, tile, mask=left)
        tl.store(ids + places, begin + lanes, mask=left)
        count += tl.sum(left.to(tl.int32), 0)
    tl.debug_barrier()

    floor, first_id = _cut(scores, ids, count, mass, highest, last, top_k, top_p, vocab_size, BLOCK)
    worth = tl.full([], float("-inf"), tl.float64)
    key = _key(record)
    for begin in range(0, count, BLOCK):
        tile, orders, token_ids = _load(scores, ids, begin, count, BLOCK)
        left = (orders > floor) | ((orders == floor) & (token_ids >= first_id))
        left = left & (tl.exp(tile - highest) >= min_p)
        worth, token = _best(tl.where(left, tile, float("-inf")), token_ids, key, highest, worth, token)
    return token


@triton.jit
def _last_bin(histogram, mass, top_k, top_p, min_p):
    """Return the last bin, counted from the best score on, with a token that the filters may leave."""
    last = BINS - 1
    if top_k > 0:
        last = tl.minimum(last, tl.sum((tl.cumsum(histogram, 0) < top_k).to(tl.int32), 0))
    else:
        if top_p < 1.0:
            bins = tl.arange(0, BINS)
            least = tl.exp((bins + 1).to(tl.float32) / -BINS_PER_UNIT)  # the least weight of a token in a bin
            least = tl.where(bins == BINS - 1, 0.0, least)
            sums = tl.cumsum(histogram.to(tl.float32) * least, 0) * (1.0 - HAIR)
            wanted = top_p * (mass.to(tl.float32) / WHOLE)
            last = tl.minimum(last, tl.sum((sums < wanted).to(tl.int32), 0))
        if min_p > 0.0:
            last = tl.minimum(last, (-tl.log(min_p) * BINS_PER_UNIT).to(tl.int32) + 1)
    return last


@triton.jit
def _cut(scores, ids, count, mass, highest, last, top_k, top_p, vocab_size, BLOCK: tl.constexpr):
    """Return the least score, as an ordered integer, that top_k and top_p leave, and the lowest id with that score that
    they leave."""
    below = tl.full([], LOWEST, tl.int64) - 1
    if last < BINS - 1:
        below = _ordered(highest - (last + 2).to(tl.float32) / BINS_PER_UNIT).to(tl.int64)
    most = _ordered(highest).to(tl.int64)
    floor = below + 1
    if top_k > 0:
        beyond = most + 1
        while beyond - floor > 1:
            middle = floor + (beyond - floor) // 2
            if _num_from(scores, ids, count, middle, BLOCK) >= top_k:
                floor = middle
            else:
                beyond = middle
        mass = _mass_above(scores, ids, count, floor - 1, highest, BLOCK)
    first_id = 0
    if top_p < 1.0:
        target = tl.maximum(tl.ceil(top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)
        below = floor - 1
        floor = most
        while floor - below > 1:
            middle = below + (floor - below) // 2
            if _mass_above(scores, ids, count, middle, highest, BLOCK) < target:
                floor = middle
            else:
                below = middle
        ties, weight = _ties(scores, ids, count, floor, highest, BLOCK)
        wanted = target - _mass_above(scores, ids, count, floor, highest, BLOCK)
        if ties * weight > wanted:
            beyond_id = vocab_size
            while beyond_id - first_id > 1:
                middle_id = first_id + (beyond_id - first_id) // 2
                if _num_ties(scores, ids, count, floor, middle_id, BLOCK) * weight >= wanted:
                    first_id = middle_id
                else:
                    beyond_id = middle_id
    return floor, first_id


@triton.jit
def _load(scores, ids, begin, count, BLOCK: tl.constexpr):
    """Load scores, these as ordered int64, and ids [BLOCK] of tokens that may be left."""
    places = begin + tl.arange(0, BLOCK)
    tile = tl.load(scores + places, mask=places < count, other=float("-inf"))
    token_ids = tl.load(ids + places, mask=places < count, other=-1)
    return tile, tl.where(places < count, _ordered(tile).to(tl.int64), LOWEST - 1), token_ids


@triton.jit
def _num_from(scores, ids, count, floor, BLOCK: tl.constexpr):
    """Return how many tokens are at `floor` or above."""
    total = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, count, BLOCK):
        _, orders, _ = _load(scores, ids, begin, count, BLOCK)
        total += (orders >= floor).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _mass_above(scores, ids, count, floor, highest, BLOCK: tl.constexpr):
    """Return the weight of the tokens above `floor`."""
    total = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, count, BLOCK):
        tile, orders, _ = _load(scores, ids, begin, count, BLOCK)
        total += tl.where(orders > floor, _weight(tile, highest), 0)
    return tl.sum(total, 0)


@triton.jit
def _ties(scores, ids, count, floor, highest, BLOCK: tl.constexpr):
    """Return how many tokens are at `floor`, and the weight of each."""
    total = tl.zeros([BLOCK], tl.int64)
    weight = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, count, BLOCK):
        tile, orders, _ = _load(scores, ids, begin, count, BLOCK)
        total += (orders == floor).to(tl.int64)
        weight = tl.maximum(weight, tl.where(orders == floor, _weight(tile, highest), 0))
    return tl.sum(total, 0), tl.max(weight, 0)


@triton.jit
def _num_ties(scores, ids, count, floor, first_id, BLOCK: tl.constexpr):
    """Return how many tokens at `floor` have `first_id` or a higher id."""
    total = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, count, BLOCK):
        _, orders, token_ids = _load(scores, ids, begin, count, BLOCK)
        total += ((orders == floor) & (token_ids >= first_id)).to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _bin(tile, highest):
    """Return how far scores are below the highest, in bins; the last bin has all that are further."""
    return tl.minimum((highest - tile) * BINS_PER_UNIT, BINS - 1.0).to(tl.int32)


@triton.jit
def _weight(tile, highest):
    """Return exp(score - highest) as whole numbers, so that the order of sums does not matter."""
    return (tl.exp(tile - highest) * WHOLE).to(tl.int64)


@triton.jit
def _ordered(scores):
    """Return integers in the order of fp32 scores; -0.0 equals 0.0."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _finite(highest):
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _float(place):
    return tl.load(place).to(tl.float32, bitcast=True)


@triton.jit
def _key(record):
    low, high = tl.load(record + KEY_LOW), tl.load(record + KEY_HIGH)
    return (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _best(tile, ids, key, reference, worth, token):
    """Return the token with the largest sum of score and noise among fp32 scores [BLOCK], or the given one if its sum
    in fp64, `worth`, is larger; of equals the lowest id. `reference`: a score near the highest."""
    rough = (tile - reference) + _rough_noise(key, ids)
    top = tl.max(rough, 0)
    least = tl.maximum(top, (worth - reference.to(tl.float64)).to(tl.float32)) - NEAR
    while (top >= least) & (top > float("-inf")):
        other = tl.min(tl.where(rough == top, ids, NO_ID), 0)
        value = tl.max(tl.where(ids == other, tile, float("-inf")), 0).to(tl.float64) + _noise(key, other)
        better = (value > worth) | ((value == worth) & (other < token))
        worth = tl.where(better, value, worth)
        token = tl.where(better, other, token)
        rough = tl.where(ids == other, float("-inf"), rough)
        top = tl.max(rough, 0)
    return worth, token


@triton.jit
def _bits(key, ids):
    """Return 53 bits of SplitMix64 seeded with `key`, at index `ids` (sampling/noise.py)."""
    x = (ids.to(tl.int64) + 1).to(tl.uint64) * GOLDEN + key
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return (x ^ (x >> 31)) >> 11


@triton.jit
def _rough_noise(key, ids):
    """Return Gumbel noise in fp32, wrong by less than 5e-5. Both ends of (0, 1) have the precision of the distance to
    them."""
    bits = _bits(key, ids)
    upper = bits >= 1 << 52
    near = tl.where(upper, bits ^ ((1 << 53) - 1), bits).to(tl.float32) * 2.0**-53 + 2.0**-54
    series = near * (1.0 + near * (0.5 + near * (1.0 / 3.0 + near * (0.25 + near * 0.2))))
    log = -tl.log(tl.where(upper, near, 1.0 - near))
    return -tl.log(tl.where(upper | (near > 0.03125), log, series))


@triton.jit
def _noise(key, id):
    """Return Gumbel noise in fp64, -log(-log1p(-u)), with Kahan's log1p, within a few units of the last place."""
    u = (_bits(key, id).to(tl.float64) + 0.5) * 2.0**-53
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)  # what rounding took away
    return -tl.log(tl.where(rest == 1.0, u, -tl.log(rest) * (u / lost)))
