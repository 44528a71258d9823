import numpy as np
import pytest

from kvtransfer.errors import ProtocolError
from kvtransfer.layout import KVGroup, KVLayout, Range
from kvtransfer.memory.blocks import BlockMemory, Cells
from kvtransfer.memory.digest import cell_sums, make_digests, mix64, span_names, staged_sums, weights

NUM_LAYERS, NUM_CELLS, NUM_TOKENS = 3, 4, 300
FORMS = (("bf16", 16), ("fp32", 12), ("int8", 16), ("int4", 10), ("fp8_e4m3", 12))


def pool(form: str, head_dim: int, block_size: int) -> tuple[Cells, np.ndarray]:
    """The same KV whatever the block size is, in blocks of some order."""
    shape = KVLayout((KVGroup("paged", NUM_LAYERS, NUM_CELLS // 2, head_dim, form, block_size),))
    num_blocks = shape.num_blocks(NUM_TOKENS) + 5
    memory = BlockMemory(np.zeros(num_blocks * shape.block_bytes, np.uint8), shape)
    ids = np.random.default_rng(block_size).permutation(num_blocks)[: shape.num_blocks(NUM_TOKENS)]
    positions = np.arange(NUM_TOKENS)
    cells = Cells(memory, shape.whole[0], 0)
    for index, plane in enumerate(cells.planes):
        size = (NUM_TOKENS, 2 * NUM_LAYERS, NUM_CELLS // 2, plane.shape[-1])
        rows = np.random.default_rng(index).integers(0, 256, size, dtype=np.uint8)
        plane[ids[positions // block_size], :, :, positions % block_size] = rows
    return cells, ids


def digests_of(cells: Cells, ids: np.ndarray, moved: Range, names: list[bytes], kind: str = "sum") -> np.ndarray:
    layout = cells.memory.layout
    return make_digests(kind, layout, layout.whole[0], names).of_pool(cells, ids, moved)


NAMES = [bytes([index]) * 32 for index in range(5)]


@pytest.mark.parametrize("form, head_dim", FORMS)
def test_unequal_block_sizes_compare(form, head_dim):
    whole = Range(0, NUM_TOKENS, 0, NUM_LAYERS)
    sums = [cell_sums(*pool(form, head_dim, block_size), whole) for block_size in (1, 16, 32, 64, 128)]
    assert all((each == sums[0]).all() for each in sums)
    assert sums[0].shape == (5, NUM_LAYERS * NUM_CELLS) and len(np.unique(sums[0])) == sums[0].size


@pytest.mark.parametrize("block_size", (16, 64, 128))
@pytest.mark.parametrize("form, head_dim", FORMS)
def test_parts_add_up(form, head_dim, block_size):
    memory, ids = pool(form, head_dim, block_size)
    whole = cell_sums(memory, ids, Range(0, NUM_TOKENS, 0, NUM_LAYERS))
    for cuts in ((0, 64, 192, NUM_TOKENS), (0, 5, 100, 130, NUM_TOKENS)):
        total = np.zeros_like(whole)
        for begin, end in zip(cuts, cuts[1:]):
            part = cell_sums(memory, ids, Range(begin, end, 0, NUM_LAYERS))
            total[begin // 64 : begin // 64 + len(part)] += part
        assert (total == whole).all()
    layers = [cell_sums(memory, ids, Range(0, NUM_TOKENS, layer, layer + 1)) for layer in range(NUM_LAYERS)]
    assert (np.concatenate(layers, axis=1) == whole).all()


def test_a_digest_is_its_definition_in_plain_python():
    """Word by word in plain Python, as a reference for other devices."""
    cells, ids = pool("bf16", 16, 64)
    memory = cells.memory
    name = bytes(range(32))
    found = digests_of(cells, ids, Range(0, 64, 1, 2), [name])
    mask = 2**64 - 1

    def mix(value):
        value = (value + 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    cell = NUM_CELLS + 1  # layer 1, K, head 1
    data = memory.blocks[ids[0], cell * 64 * 32 : (cell + 1) * 64 * 32].tobytes()
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    total = sum(word * (mix(index) | 1) for index, word in enumerate(words))
    seed = int.from_bytes(name[:8], "little")
    assert int(found[0, 1]) == mix((total + mix((seed + cell) & mask)) & mask)


@pytest.mark.parametrize("kind", ("sum", "sha256"))
def test_every_flipped_bit_of_a_cell_is_found(kind):
    cells, ids = pool("bf16", 16, 16)
    memory = cells.memory
    moved = Range(0, 64, 0, 1)
    before = digests_of(cells, ids, moved, NAMES, kind)
    for bit in range(0, 64 * 32 * 8, 37):
        token, offset = divmod(bit // 8, 32)
        byte = (2 * 16 + token % 16) * 32 + offset  # cell 2 of the block that holds the token
        memory.blocks[ids[token // 16], byte] ^= 1 << bit % 8
        wrong = digests_of(cells, ids, moved, NAMES, kind) != before
        assert np.argwhere(wrong.reshape(1, NUM_CELLS, -1).any(axis=2)).tolist() == [[0, 2]]
        memory.blocks[ids[token // 16], byte] ^= 1 << bit % 8


@pytest.mark.parametrize("kind", ("sum", "sha256"))
def test_swapped_words_spans_and_names_are_found(kind):
    cells, ids = pool("bf16", 16, 64)
    whole = Range(0, NUM_TOKENS, 0, NUM_LAYERS)
    before = digests_of(cells, ids, whole, NAMES, kind)
    assert (digests_of(cells, ids[[1, 0, 2, 3, 4]], whole, NAMES, kind)[:2] != before[:2]).any(axis=-1).all()
    assert (digests_of(cells, ids, whole, NAMES[::-1], kind)[[0, 1, 3, 4]] != before[[0, 1, 3, 4]]).any(axis=-1).all()
    words = cells.memory.blocks[ids[0]].view("<u8")
    words[[0, 1]] = words[[1, 0]]
    assert (digests_of(cells, ids, whole, NAMES, kind)[0, 0] != before[0, 0]).any()


@pytest.mark.parametrize("kind", ("sum", "sha256"))
@pytest.mark.parametrize("form, head_dim", FORMS)
def test_staged_rows_have_the_digests_of_their_pool(form, head_dim, kind):
    for block_size in (16, 128):
        cells, ids = pool(form, head_dim, block_size)
        for moved in (Range(0, NUM_TOKENS, 0, NUM_LAYERS), Range(64, 192, 1, 2), Range(256, NUM_TOKENS, 0, 2)):
            staged = cells.gather(ids, moved, cells.stage(moved))
            digests = make_digests(kind, cells.memory.layout, cells.memory.layout.whole[0], NAMES)
            assert (digests.of_staged(staged, moved) == digests.of_pool(cells, ids, moved)).all()
            if moved.token_begin == 0:
                assert (staged_sums(staged, moved.num_tokens) == cell_sums(cells, ids, moved)).all()


def test_an_unknown_kind_is_refused():
    cells, _ = pool("bf16", 16, 64)
    for kind in ("", "md5"):
        with pytest.raises(ProtocolError, match="one of sum, sha256"):
            make_digests(kind, cells.memory.layout, cells.memory.layout.whole[0], NAMES)


def test_the_tail_has_a_name_of_its_own():
    tails = [span_names([], parent, tokens)[0] for parent in (bytes(32), b"x" * 32) for tokens in (5, 6)]
    assert len(set(tails)) == 4 and len(span_names([bytes(32)], bytes(32), 64)) == 1


def test_weights_are_odd_and_differ():
    table = weights(4096)
    assert (table & np.uint64(1)).all() and len(np.unique(table)) == 4096
    assert len(np.unique(mix64(np.arange(1000, dtype=np.uint64)))) == 1000
