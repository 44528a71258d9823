import numpy as np
import pytest

from kvtransfer.errors import LayoutMismatch, ProtocolError
from kvtransfer.layout import KVGroup, KVLayout, NumericsClass, Range
from kvtransfer.memory.blocks import BlockMemory, Cells, Piece, check_movable, pieces_of, selections
from tests.support.kvtransfer.rig import layout


def test_bytes_of_a_block():
    group = KVGroup("paged", 32, 8, 128, "bf16", 64)
    assert (group.row_bytes, group.cell_bytes, group.block_bytes) == (256, 16384, 8 << 20)
    quantized = KVGroup("paged", 32, 8, 128, "int4", 64)
    assert quantized.scale_bytes == 32 * 2 * 8 * 64 * 4
    assert quantized.block_bytes == (8 << 20) // 4 + quantized.scale_bytes
    latent = KVGroup("latent", 61, 1, 576, "int8", 64)
    assert latent.block_bytes == 61 * 64 * (576 + 2)


def test_blocks_and_spans_fit():
    assert [layout(32).num_blocks(tokens) for tokens in (0, 1, 32, 33)] == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="48"):
        layout(48)
    with pytest.raises(ValueError, match="fp12"):
        layout(32, "fp12")


def test_fingerprints_differ():
    assert layout(16).fingerprint == layout(16).fingerprint != layout(32).fingerprint


def test_numerics_class_reads_what_it_prints():
    ours = NumericsClass("0123456789abcdef", "bf16", "bf16", "int8", 2, False, ("fast-rope",))
    assert NumericsClass.parse(str(ours)) == ours


@pytest.mark.parametrize("bad", (KVGroup("window", 1, 1, 8, "bf16", 16), KVGroup("paged", 1, 1, 8, "bf16", 32)))
def test_only_paged_groups_of_one_block_size_move(bad):
    with pytest.raises(LayoutMismatch):
        check_movable(KVLayout((KVGroup("paged", 1, 1, 8, "bf16", 16), bad)))


def test_a_range_is_cut_into_pieces_of_whole_blocks():
    assert pieces_of(Range(0, 300, 0, 3), 64) == [Piece(0, 4, 0, 64), Piece(4, 5, 0, 44)]
    assert pieces_of(Range(64, 300, 0, 3), 128) == [Piece(0, 1, 64, 128), Piece(1, 2, 0, 128), Piece(2, 3, 0, 44)]
    assert pieces_of(Range(64, 128, 0, 3), 256) == [Piece(0, 1, 64, 128)]


@pytest.mark.parametrize("num_bytes", (100, 1 << 20))
def test_selections_take_every_block_once(num_bytes):
    rng = np.random.default_rng(0)
    ours, theirs = np.sort(rng.choice(400, 200, replace=False)), np.arange(200)
    seen = []
    for begin, end, (here, there) in selections(num_bytes, ours, theirs):
        pool = np.arange(400)
        assert (pool[here] == ours[begin:end]).all() and (pool[there] == theirs[begin:end]).all()
        seen.extend(range(begin, end))
    assert seen == list(range(200))


@pytest.mark.parametrize("form", ("bf16", "int8", "int4"))
@pytest.mark.parametrize("moved", (Range(0, 300, 0, 3), Range(64, 300, 1, 3), Range(128, 192, 0, 1)))
@pytest.mark.parametrize("block_size", (16, 64, 128))
@pytest.mark.parametrize("in_blocks", (True, False))
def test_outgoing_and_incoming_are_one_order(form, moved, block_size, in_blocks):
    shape = layout(block_size, form)
    rng = np.random.default_rng(1)
    source = BlockMemory(rng.integers(0, 256, 30 * shape.block_bytes, dtype=np.uint8), shape)
    direct, wired = (BlockMemory(np.zeros(30 * shape.block_bytes, np.uint8), shape) for _ in range(2))
    theirs, ours = rng.permutation(30), rng.permutation(30)
    here, there, received = (Cells(memory, shape.whole[0], 0) for memory in (direct, source, wired))
    here.copy_from(there, ours, theirs, moved)
    data = b"".join(bytes(part) for group in there.outgoing(theirs, moved, in_blocks) for part in group)
    assert len(data) == there.num_bytes(moved)
    for group in received.incoming(ours, moved, in_blocks):
        for buffer in group:
            buffer[:], data = data[: len(buffer)], data[len(buffer) :]
    assert not data and (direct.blocks == wired.blocks).all() and direct.blocks.any()


def test_foreign_block_ids():
    memory = BlockMemory(bytearray(3 * layout().block_bytes), layout())
    for ids in ([-1], [3], [0, 1, 99]):
        with pytest.raises(ProtocolError, match="3 blocks"):
            memory.check_ids(ids)
