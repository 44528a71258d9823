import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import Box, KVGroup, KVLayout, Range
from kvtransfer.memory.byte_runs import HEIGHT, WIDTH, BoxOfPool, merged_runs, single_rows

NUM_BLOCKS = 12


def pool(
    block_size: int, form: str, kind: str = "paged", layers: tuple[int, int] = (0, 0), heads: tuple[int, int] = (0, 0),
    before: bool = True,
) -> BoxOfPool:  # fmt: skip
    """A box of 2 layers and heads (of a latent group 1), in a pool that has so many more before and behind; in its
    blocks another group comes `before`."""
    num_heads = 1 if kind == "latent" else 2
    group = KVGroup(kind, 2 + sum(layers), num_heads + sum(heads), 4, form, block_size)
    groups = (KVGroup("paged", 1, 1, 8, form, block_size), group) if before else (group,)
    box = Box(len(groups) - 1, range(layers[0], layers[0] + 2), range(heads[0], heads[0] + num_heads))
    return BoxOfPool(KVLayout(groups), box)


more = st.tuples(st.integers(0, 2), st.integers(0, 2))


@given(
    block_size=st.sampled_from((1, 4, 16)), form=st.sampled_from(("bf16", "int8", "int4")), seed=st.integers(0, 99),
    kind=st.sampled_from(("paged", "latent")), cuts=st.tuples(more, more, more, more), before=st.booleans(),
    tokens=st.tuples(st.integers(0, 60), st.integers(0, 60)), layers=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)  # fmt: skip
def test_exactly_the_range_is_covered(block_size, form, kind, seed, cuts, before, tokens, layers):
    """Each byte of the range once and no other, wherever its heads and layers are in the blocks of either side."""
    rng = np.random.default_rng(seed)
    cuts = cuts if kind == "paged" else (cuts[0], (0, 0), cuts[2], (0, 0))
    source, own = pool(block_size, form, kind, *cuts[:2], before), pool(block_size, form, kind, *cuts[2:])
    num_tokens = min(60, NUM_BLOCKS * block_size)
    begin, end = sorted(min(token, num_tokens) for token in tokens)
    first, last = sorted(layers)
    source_ids, own_ids = (rng.permutation(NUM_BLOCKS) for _ in range(2))
    runs = merged_runs(source, own, source_ids, own_ids, Range(begin, end, first, last))
    came_from = np.full(NUM_BLOCKS * own.layout.block_bytes, -1)
    for there, here, num_bytes in single_rows(runs):
        assert (came_from[here : here + num_bytes] == -1).all(), "once"
        came_from[here : here + num_bytes] = np.arange(there, there + num_bytes)
    expected = np.full(came_from.shape, -1)
    for token in range(begin, end):
        block, row = divmod(token, block_size)
        places = [
            ids[block] * each.layout.block_bytes + _bytes_of(each, row, first, last)
            for each, ids in ((source, source_ids), (own, own_ids))
        ]
        expected[places[1]] = places[0]
    assert (came_from == expected).all()


def _bytes_of(place: BoxOfPool, row: int, first: int, last: int) -> np.ndarray:
    """Offsets within a block, the slow way."""
    found, box = [], place.box
    group = place.layout.groups[box.group]
    offset = sum(each.block_bytes for each in place.layout.groups[: box.group])
    for row_bytes in (group.row_bytes, {"int8": 2, "int4": 4}.get(group.form, 0)):
        for layer in range(group.num_layers):
            for _ in range(group.num_kinds):
                for head in range(group.num_kv_heads):
                    if layer - box.layers.start in range(first, last) and head in box.heads:
                        found.extend(range(offset + row * row_bytes, offset + (row + 1) * row_bytes))
                    offset += group.block_size * row_bytes
    return np.array(found, np.int64)


def test_neighbours_are_one_run():
    whole, ids = pool(16, "bf16", before=False), np.arange(NUM_BLOCKS)
    runs = merged_runs(whole, whole, ids, ids + 100, Range(0, 16 * NUM_BLOCKS, 0, 2))
    assert len(runs) == 1 and runs[0, WIDTH] == NUM_BLOCKS * whole.layout.block_bytes
    scattered = merged_runs(whole, whole, ids, ids[::-1].copy(), Range(0, 16 * NUM_BLOCKS, 0, 2))
    assert len(scattered) == NUM_BLOCKS
    tail = merged_runs(whole, whole, ids, ids, Range(0, 5, 0, 2))  # the beginning of one block: a strip
    assert len(tail) == 1 and list(tail[:, HEIGHT]) == [8]


def test_a_rank_reads_its_heads_in_one_strip_a_block():
    """Of all rows of a block; of some rows it is a strip a head."""
    cut, whole, ids = (
        pool(16, "bf16", before=False),
        pool(16, "bf16", heads=(2, 2), before=False),
        np.arange(NUM_BLOCKS),
    )
    for source, own in ((cut, whole), (whole, cut)):
        runs = merged_runs(source, own, ids, ids, Range(0, 16 * NUM_BLOCKS, 0, 2))
        assert len(runs) == NUM_BLOCKS and set(runs[:, HEIGHT]) == {4} and set(runs[:, WIDTH]) == {2 * 16 * 8}
        tail = merged_runs(source, own, ids, ids, Range(0, 5, 0, 2))
        assert len(tail) == 2 and set(tail[:, HEIGHT]) == {4} and set(tail[:, WIDTH]) == {5 * 8}


@pytest.mark.parametrize("moved", (Range(0, 0, 0, 2), Range(64, 64, 0, 2), Range(0, 64, 2, 2)))
def test_nothing_to_move(moved):
    ids, whole = np.arange(NUM_BLOCKS), pool(16, "int8")
    assert len(merged_runs(whole, whole, ids, ids, moved)) == 0 == len(single_rows(np.empty((0, 6), np.int64)))
