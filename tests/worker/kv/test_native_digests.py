"""Kernels that the worker gives to kvtransfer: copies and sums like numpy's, rows like the engine's own."""

import numpy as np
import pytest
import torch

from baton.engine import native
from baton.engine.kv.stored_forms import encode
from baton.worker.kv.convert import convert_rows
from baton.worker.kv.native_digests import memory_kernels
from kvtransfer.layout import Box, KVGroup, KVLayout, Range
from kvtransfer.memory import digest
from kvtransfer.memory.blocks import BlockMemory, Cells, MemoryKernels

NUM_TOKENS = 300
RANGES = (Range(0, NUM_TOKENS, 0, 3), Range(64, 192, 1, 3), Range(256, NUM_TOKENS, 0, 1))


@pytest.fixture
def native_kernels():
    if (kernels := memory_kernels()) is None:
        pytest.skip(native.unavailable())
    return kernels


def use(kernels: MemoryKernels | None, *pools: Cells) -> None:
    """None: numpy."""
    for pool in pools:
        pool.memory.kernels = kernels


def cells(
    form: str, block_size: int, heads: range, seed: int, head_dim: int = 16, num_tokens: int = NUM_TOKENS
) -> tuple[Cells, np.ndarray]:
    layout = KVLayout((KVGroup("paged", 3, 4, head_dim, form, block_size),))
    rng, num_blocks = np.random.default_rng(seed), layout.num_blocks(num_tokens) + 4
    memory = BlockMemory(rng.integers(0, 256, num_blocks * layout.block_bytes, dtype=np.uint8), layout)
    return Cells(memory, Box(0, range(3), heads), 0), rng.permutation(num_blocks)


@pytest.mark.parametrize("heads", (range(4), range(1, 3)), ids=("all", "some"))
@pytest.mark.parametrize("form", ("bf16", "int8", "int4"))
@pytest.mark.parametrize("block_size", (16, 64, 128))
def test_native_sums_are_numpys_and_copy_on_the_way(native_kernels, form, block_size, heads):
    (source, source_ids), (taker, taker_ids) = cells(form, block_size, heads, 1), cells(form, block_size, heads, 2)
    digests = digest.make_digests(
        "sum", source.memory.layout, Box(0, range(3), heads), [bytes([i]) * 32 for i in range(5)]
    )
    for moved in RANGES:
        use(native_kernels, source, taker)
        kept = taker.memory.blocks.copy()
        copied = digests.copied(taker, source, taker_ids, source_ids, moved)
        result = taker.memory.blocks.copy()
        assert (digests.of_pool(taker, taker_ids, moved) == copied).all()
        for kernels in (native_kernels, None):
            use(kernels, source, taker)
            assert (digests.of_pool(source, source_ids, moved) == copied).all()
            taker.memory.blocks[:] = kept
            taker.copy_from(source, taker_ids, source_ids, moved)
            assert (taker.memory.blocks == result).all(), "the same bytes as a plain copy, and no others"


@pytest.mark.parametrize("head_dim", (64, 12), ids=("aligned", "at-odd-places"))
def test_what_is_stored_around_the_caches_is_the_same(native_kernels, head_dim):
    """More than 1 MiB at once: whole blocks, some layers, some heads, some rows of a block."""
    num_tokens = 32 * 1024 // head_dim * 3 + 40
    whole, some_layers = Range(0, num_tokens, 0, 3), Range(64, num_tokens, 1, 3)
    for heads, moved in ((range(4), whole), (range(4), some_layers), (range(1, 3), whole)):
        pools = (cells("bf16", 64, heads, seed, head_dim, num_tokens) for seed in (1, 2))
        (source, source_ids), (taker, taker_ids) = pools
        assert source.num_bytes(moved) > 1 << 20
        names = [bytes([i % 256]) * 32 for i in range(-(-num_tokens // 64))]
        digests = digest.make_digests("sum", source.memory.layout, Box(0, range(3), heads), names)
        kept, results = taker.memory.blocks.copy(), []
        for kernels in (native_kernels, None):
            use(kernels, source, taker)
            taker.memory.blocks[:] = kept
            found = digests.copied(taker, source, taker_ids, source_ids, moved)
            summed = taker.memory.blocks.copy()
            taker.memory.blocks[:] = kept
            taker.copy_from(source, taker_ids, source_ids, moved)
            results.append((found, summed, taker.memory.blocks.copy()))
        assert all((ours == theirs).all() for ours, theirs in zip(*results))
        assert (results[0][1] == results[0][2]).all()


@pytest.mark.parametrize("source_form", ("fp32", "bf16", "int8"))
@pytest.mark.parametrize("taker_form", ("bf16", "fp8_e4m3", "int8", "int4"))
def test_rows_are_what_the_engine_would_have_stored(source_form, taker_form):
    values = torch.randn(33, 16, generator=torch.Generator().manual_seed(1))
    rows, scales = (part.numpy() for part in encode(source_form, values))
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(source_form)
    exact = torch.from_numpy(rows.copy()).view(stored) if stored else None
    found, found_scales = convert_rows(rows, scales, source_form, taker_form)
    if exact is not None:
        wanted, wanted_scales = encode(taker_form, exact)
        assert (found == wanted.numpy()).all() and (found_scales == wanted_scales.numpy()).all()
    again, again_scales = convert_rows(rows[5:6], scales[5:6], source_form, taker_form)
    assert (again == found[5:6]).all() and (again_scales == found_scales[5:6]).all(), "a row does not depend on others"
