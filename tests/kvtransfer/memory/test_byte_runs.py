import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import KVGroup, KVLayout
from kvtransfer.memory.byte_runs import HEIGHT, WIDTH, merged_runs, single_rows
from kvtransfer.wire import Range

NUM_BLOCKS = 12


def layout(block_size: int, form: str, kind: str = "paged") -> KVLayout:
    return KVLayout((KVGroup("paged", 2, 2, 8, form, block_size), KVGroup(kind, 1, 1, 4, form, block_size)))


@given(
    block_size=st.sampled_from((1, 4, 16)), form=st.sampled_from(("bf16", "int8", "int4")), seed=st.integers(0, 99),
    kind=st.sampled_from(("paged", "latent")),
    tokens=st.tuples(st.integers(0, 60), st.integers(0, 60)), layers=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)  # fmt: skip
def test_exactly_the_range_is_covered(block_size, form, kind, seed, tokens, layers):
    """Each byte of the range once and no other, at the same place of a block on both sides."""
    shape, rng = layout(block_size, form, kind), np.random.default_rng(seed)
    num_tokens = min(60, NUM_BLOCKS * block_size)
    begin, end = sorted(min(token, num_tokens) for token in tokens)
    first, last = sorted(layers)
    source_ids, own_ids = (rng.permutation(NUM_BLOCKS) for _ in range(2))
    runs = merged_runs(shape, source_ids, own_ids, Range(begin, end, first, last))
    expected = np.zeros((NUM_BLOCKS, shape.block_bytes), np.uint8)
    for token in range(begin, end):
        expected[own_ids[token // block_size], _bytes_of(shape, token % block_size, first, last)] += 1
    reached = np.zeros(expected.size, np.uint8)
    where = np.zeros(expected.size, np.int64)
    for source, own, num_bytes in single_rows(runs):
        reached[own : own + num_bytes] += 1
        where[own : own + num_bytes] = np.arange(source, source + num_bytes)
    assert (reached == expected.ravel()).all()
    own = np.flatnonzero(reached)
    position = {int(block): index for index, block in enumerate(own_ids)}
    for at in own[:: max(1, len(own) // 50)]:
        block, rest = divmod(int(at), shape.block_bytes)
        assert where[at] == source_ids[position[block]] * shape.block_bytes + rest


def _bytes_of(shape: KVLayout, row: int, first: int, last: int) -> list[int]:
    """Offsets within a block, the slow way."""
    found, offset, layer = [], 0, 0
    for group in shape.groups:
        for row_bytes in (group.row_bytes, {"int8": 2, "int4": 4}.get(group.form, 0)):
            for each in range(group.num_layers):
                for _ in range((1 if group.kind == "latent" else 2) * group.num_kv_heads):
                    if first <= layer + each < last:
                        found.extend(range(offset + row * row_bytes, offset + (row + 1) * row_bytes))
                    offset += group.block_size * row_bytes
        layer += group.num_layers
    return found


def test_neighbours_are_one_run():
    shape, ids = layout(16, "bf16"), np.arange(NUM_BLOCKS)
    runs = merged_runs(shape, ids, ids + 100, Range(0, 16 * NUM_BLOCKS, 0, 3))
    assert len(runs) == 1 and runs[0, WIDTH] == NUM_BLOCKS * shape.block_bytes
    scattered = merged_runs(shape, ids, ids[::-1].copy(), Range(0, 16 * NUM_BLOCKS, 0, 3))
    assert len(scattered) == NUM_BLOCKS
    tail = merged_runs(shape, ids, ids, Range(0, 5, 0, 3))  # the beginning of one block: a strip per plane
    assert len(tail) == 2 and list(tail[:, HEIGHT]) == [8, 2]


@pytest.mark.parametrize("moved", (Range(0, 0, 0, 3), Range(64, 64, 0, 3), Range(0, 64, 2, 2)))
def test_nothing_to_move(moved):
    ids = np.arange(NUM_BLOCKS)
    assert len(merged_runs(layout(16, "int8"), ids, ids, moved)) == 0 == len(single_rows(np.empty((0, 5), np.int64)))
