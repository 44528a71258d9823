"""The Triton kernels: in the interpreter on a CPU (tiny steps, it is slow), compiled where there is a GPU."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from baton.engine import kernels
from baton.engine.attention import triton_paged
from baton.engine.attention.base import AttentionShape
from baton.engine.attention.selection import BACKENDS
from baton.engine.attention.triton_paged import FIXED_SPLIT, Launch, TritonAttention
from baton.engine.core.batch import SeqSlice, SeqTable
from baton.engine.kv.stored_forms import STORED
from kvtransfer.layout import KVGroup
from tests.support.engine.attention.attention_step import (
    CAPPED,
    assert_close_to_exact,
    attended,
    batch_of,
    one_step,
    with_sinks,
)

WINDOW = 40
TRITON = ("triton", "triton-fast")
HEADS = [(2, 1, 64), (5, 1, 96), (4, 2, 256), (4, 4, 128), (71, 1, 24)]
LENGTHS = [(1, 1), (1, 64), (3, 65), (35, 70), (1, FIXED_SPLIT + 5)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if reason := kernels.unavailable(request.param):
        pytest.skip(reason)
    return torch.device(request.param)


def made(name, heads, device, dtype=torch.float32, windows=(None, WINDOW), form=""):
    shape = AttentionShape(*heads, windows, dtype, device, form)
    if reason := BACKENDS[name].unfit(shape):
        pytest.skip(reason)
    return BACKENDS[name](shape)


@pytest.mark.parametrize(
    ("heads", "name"),
    [
        *((heads, "triton") for heads in HEADS),
        *((heads, "triton-fast") for heads in HEADS[::2]),
        *(pytest.param(heads, "triton-fast", marks=pytest.mark.long) for heads in HEADS[1::2]),
    ],
    ids=str,
)
def test_against_fp64(name, heads, device):
    """Every group size and head dimension; chunks with a prefix and decode in one step, a full and a windowed layer."""
    backend = made(name, heads, device)
    block_size = 8 if heads[0] == 5 else 64
    lengths = LENGTHS[:3] if heads[0] == 71 else LENGTHS
    assert_close_to_exact(backend, *one_step(backend.shape, lengths, block_size, seed=heads[0]), atol=3e-6)


@pytest.mark.parametrize("name", TRITON)
@pytest.mark.parametrize("form", STORED)
def test_every_stored_form_is_near_exact_attention(name, form, device):
    """Decoded in the kernel: what remains is the rounding of bf16 products, not that of the form."""
    backend = made(name, (2, 1, 64), device, torch.bfloat16, (None,), form)
    assert_close_to_exact(backend, *one_step(backend.shape, [(1, 90), (9, 75)], form=form), atol=2e-2)


@pytest.mark.parametrize("name", TRITON)
def test_a_given_scale_and_soft_cap(name, device):
    backend = BACKENDS[name](AttentionShape(2, 1, 64, (None, WINDOW), torch.float32, device, **CAPPED))
    assert_close_to_exact(backend, *one_step(backend.shape, LENGTHS, 64), atol=1e-5)


@pytest.mark.parametrize("name", TRITON)
@pytest.mark.parametrize("head_dim, form", [(80, "fp32"), (576, "bf16"), (576, "int8")])
def test_latent_rows_are_keys_and_values_of_all_heads(name, head_dim, form, device):
    """One row a token is key and value of all heads; DeepSeek's has 576 elements. Decode and a chunk."""
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    shape = AttentionShape(16, 1, head_dim, (None,), dtype, device, form, given_scale=0.05)
    backend = BACKENDS[name](shape)
    step = one_step(shape, [(1, FIXED_SPLIT + 9), (2, 40)], form=form, kind="latent")
    assert_close_to_exact(backend, *step, atol=3e-6 if form == "fp32" else 2e-2)


@pytest.mark.parametrize("name", TRITON)
def test_sinks_are_near_exact_attention(name, device, monkeypatch):
    """Where programs share the splits of a row, and where one takes all: the same bits of the fixed form."""
    backend = with_sinks(BACKENDS[name](AttentionShape(2, 1, 64, (None, WINDOW), torch.float32, device, sinks=True)))
    pool, batch, q = one_step(backend.shape, LENGTHS, 64)
    assert_close_to_exact(backend, pool, batch, q, atol=1e-5)
    if backend.batch_invariant:
        for layer in range(2):
            monkeypatch.setattr(backend, "_wanted", 1 << 20)
            split = attended(backend, pool, batch, layer, q)
            monkeypatch.setattr(backend, "_wanted", 0)
            assert torch.equal(attended(backend, pool, batch, layer, q), split)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("heads", [(3, 1, 96), (2, 2, 128), (2, 1, 256)], ids=str)
def test_integers_in_every_head_dimension(heads, form, device):
    backend = made("triton", heads, device, torch.bfloat16, (WINDOW,), form)
    assert_close_to_exact(backend, *one_step(backend.shape, [(1, 90), (3, 70)], form=form), atol=2e-2)


@pytest.mark.parametrize("name", TRITON)
@pytest.mark.parametrize("form", ["fp16", "int4"])
def test_fp16_is_close_to_fp64(name, form, device):
    backend = made(name, (2, 2, 64), device, torch.float16, (None,), form)
    assert_close_to_exact(backend, *one_step(backend.shape, [(1, 90), (40, 90)], form=form), atol=4e-3)


@pytest.mark.parametrize("name", TRITON)
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_step_known_by_its_bounds(name, query_len, device):
    """As in a CUDA graph: nothing but the table, larger bounds than the step's, rows of padding with a kv_len of 0."""
    backend = made(name, (2, 1, 64), device)
    pool, batch, q = one_step(backend.shape, [(query_len, 70), (query_len, 3), (query_len, FIXED_SPLIT + 9)])
    table = SeqTable.of(batch.seqs, device)
    starts = torch.arange(5, dtype=torch.int32, device=device) * query_len
    kv_lens = torch.cat((table.kv_lens, table.kv_lens.new_zeros(1)))
    blocks = torch.nn.functional.pad(table.block_ids, (0, 5, 0, 1))
    padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, query_len))
    bounds = batch_of([])
    object.__setattr__(bounds, "table", SeqTable(starts, kv_lens, blocks, query_len, 4 * FIXED_SPLIT))
    for layer in range(2):
        known = attended(backend, pool, batch, layer, q)
        torch.testing.assert_close(attended(backend, pool, bounds, layer, padded)[: len(q)], known, atol=3e-6, rtol=0)
        if backend.batch_invariant:
            assert torch.equal(attended(backend, pool, bounds, layer, padded)[: len(q)], known)


@pytest.mark.parametrize(
    "dtype, form",
    [(torch.float32, "fp32"), pytest.param(torch.bfloat16, "int8", marks=pytest.mark.long)],
    ids=str,
)
def test_fixed_tiles_are_row_invariant(dtype, form, device, monkeypatch):
    """A token's bits are the same alone (its KV split over programs), in a crowd (not split), and in chunks of any
    length, at any place in a tile."""
    backend = made("triton", (3, 1, 64), device, dtype, form=form)
    num_tokens, kv_len = 24, FIXED_SPLIT + 30
    pool, batch, q = one_step(backend.shape, [(num_tokens, kv_len)], form=form)
    block_ids = batch.seqs[0].block_ids

    def tokens(begin: int, end: int, row: int = 0) -> SeqSlice:
        return SeqSlice(row, end - begin, kv_len - num_tokens + end, block_ids)

    apart = num_tokens // 2  # the later half: as many programs as are not split
    crowd = batch_of([tokens(apart + row, apart + row + 1, row) for row in range(apart)])
    alone = batch_of([tokens(23, 24)])
    monkeypatch.setattr(backend, "_wanted", apart)
    assert backend.plan(alone, pool).launches[0].num_splits == 2
    assert backend.plan(crowd, pool).launches[0].num_splits == 1
    whole = attended(backend, pool, batch, 1, q)
    assert torch.equal(attended(backend, pool, crowd, 1, q[apart:]), whole[apart:])
    for begin, end in ((0, 1), (23, 24), (13, 14), (5, 20)):
        got = attended(backend, pool, batch_of([tokens(begin, end)]), 1, q[begin:end])
        assert torch.equal(got, whole[begin:end]), f"rows {begin} to {end}"


def test_splits_beyond_a_group_are_merged_as_one_program_does(device, monkeypatch):
    """`combine` reads splits in groups; behind the last one, before a window, and over a group's border too."""
    from baton.engine.kernels import paged_attention  # triton is an extra

    monkeypatch.setattr(paged_attention, "GROUP_LOADS", paged_attention.tl.constexpr(16))  # as on a GPU
    backend = made("triton", (2, 1, 32), device)
    pool, batch, q = one_step(backend.shape, [(1, 17 * FIXED_SPLIT + 9), (1, 5)])
    for layer in range(2):
        monkeypatch.setattr(backend, "_wanted", 1 << 20)
        assert backend.plan(batch, pool).launches[0].num_splits == 18
        split = attended(backend, pool, batch, layer, q)
        monkeypatch.setattr(backend, "_wanted", 0)
        assert backend.plan(batch, pool).launches[0].num_splits == 1
        assert torch.equal(attended(backend, pool, batch, layer, q), split)


SPLIT = 32  # positions, for these: fewer for the interpreter to walk
LONG = 6 * SPLIT + 9


@pytest.mark.parametrize("name", TRITON)
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([(1, 30)] * 5 + [(1, LONG), (1, 7), (1, LONG - 40)], id="decode"),
        pytest.param([(20, LONG), (20, 40), (20, 90)], id="two tiles of a sequence", marks=pytest.mark.long),
        pytest.param([(1, 30), (20, LONG), (3, 90), (1, LONG - 40), (1, 9)], id="mixed", marks=pytest.mark.long),
    ],
)
def test_a_long_sequence_among_short_ones_is_shared_by_programs(name, lengths, device, monkeypatch):
    """One program for each of its KV heads walked it while all others had ended. With the fixed form the bits are those
    of any other way."""
    backend = made(name, (4, 1, 16), device)
    pool, batch, q = one_step(backend.shape, lengths)
    monkeypatch.setattr(backend, "_wanted", 6)
    monkeypatch.setattr(backend, "_dealt_split", SPLIT)
    monkeypatch.setattr(triton_paged, "FIXED_SPLIT", SPLIT)
    (launch,) = backend.plan(batch, pool).launches
    assert launch.num_sharing == 6 and launch.num_splits == 1
    counts = launch.items.diff().tolist()
    splits = [-(-kv_len // SPLIT) for query_len, kv_len in lengths for _ in range(-(-query_len * 4 // launch.tile))]
    fair = max(-(-sum(splits) // 6), 4)
    assert counts == [count if count > fair else 0 for count in splits]
    assert any(counts) or not backend.batch_invariant
    owners = [tile for tile, count in enumerate(counts) for _ in range(count)]
    assert launch.owners[: len(owners)].tolist() == owners
    assert_close_to_exact(backend, pool, batch, q, atol=3e-6)
    if not backend.batch_invariant:
        return
    shared = [attended(backend, pool, batch, layer, q) for layer in range(2)]
    for wanted, most in ((6, 7), (6, 1), (1 << 20, 2048)):  # room for one of them; for none; all KV split
        monkeypatch.setattr(backend, "_wanted", wanted)
        monkeypatch.setattr(triton_paged, "MAX_ITEMS", most)
        (other,) = backend.plan(batch, pool).launches
        assert wanted > 6 or int(other.items[-1]) == (7 if most == 7 else 0)
        for layer in range(2):
            assert torch.equal(attended(backend, pool, batch, layer, q), shared[layer])


def test_sequences_of_one_length_are_not_dealt_out(device, monkeypatch):
    """They fill the GPU as they are: partial results would cost time."""
    backend = made("triton", (2, 1, 16), device)
    monkeypatch.setattr(backend, "_wanted", 4)
    monkeypatch.setattr(backend, "_dealt_split", SPLIT)
    pool, batch, _ = one_step(backend.shape, [(1, LONG)] * 5)
    assert int(backend.plan(batch, pool).launches[0].items[-1]) == 0


def test_a_pool_that_was_planned_for_gives_its_memory_back(device):
    """That in which a start measures a step took 1 GiB of an 8B model's KV for as long as the worker lived."""
    backend = made("triton", (2, 1, 64), device)
    pool, batch, _ = one_step(backend.shape, [(1, 9)])
    backend.plan(batch, pool)
    memory = weakref.ref(pool.bytes.untyped_storage())
    del pool
    assert memory() is None


def test_the_fast_form_splits_by_load(device):
    backend = made("triton-fast", (8, 2, 64), device)
    pool, batch, _ = one_step(backend.shape, [(1, 1000)] * 2)
    (launch,) = backend.plan(batch, pool).launches
    assert launch.num_splits > 1 and launch.num_programs == launch.num_splits
    (launch,) = backend.plan(batch_of(batch.seqs * 200), pool).launches
    assert launch.num_splits == 1


@pytest.mark.parametrize("name", TRITON)
def test_a_graph_for_a_long_context_works_as_for_a_short_one(name, device, monkeypatch):
    """Its grid is bounded by the GPU; a sequence is shared by as many programs as its own length feeds."""
    backend = made(name, (2, 1, 64), device)
    monkeypatch.setattr(backend, "_wanted", 16)
    monkeypatch.setattr(backend, "_most", 32)
    pool, batch, q = one_step(backend.shape, [(1, 1000), (1, 200)])
    table = SeqTable.of(batch.seqs, device)
    bounds = batch_of([])
    object.__setattr__(bounds, "table", SeqTable(table.query_starts, table.kv_lens, table.block_ids, 1, 1 << 17))
    (launch,) = backend.plan(bounds, pool).launches
    assert launch.num_programs == (16 if backend.batch_invariant else 8)
    assert launch.num_splits == ((1 << 17) // FIXED_SPLIT if backend.batch_invariant else 8)
    launch.stats.fill_(float("nan"))
    out = torch.zeros_like(q)
    plan = backend.plan(bounds, pool)
    object.__setattr__(plan, "launches", (launch,))
    backend(plan, 0, q, out)
    used = (~launch.stats[..., 0].isnan()).sum(dim=2)[:, 0].tolist()
    assert used == ([4, 1] if backend.batch_invariant else [8, 2])  # of 256 positions; of 128, the least
    torch.testing.assert_close(out, attended(backend, pool, batch, 0, q), atol=3e-6, rtol=0)


@pytest.mark.parametrize("name", TRITON)
def test_chunks_of_several_lengths_are_planned_without_waiting(name, device, monkeypatch):
    """A copy from pageable memory waits for the step before. Nor is each token listed where nothing is combined."""
    backend = made(name, (4, 2, 64), device)
    pool, batch, _ = one_step(backend.shape, [(40, 40), (33, 70)])
    batch = replace(batch, table=SeqTable.of(batch.seqs, device))
    waits, to = [], torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to",
        lambda tensor, *given, non_blocking=False: waits.append(not non_blocking) or to(tensor, *given, non_blocking=non_blocking),
    )  # fmt: skip
    (launch,) = backend.plan(batch, pool).launches
    assert waits and not any(waits)
    assert launch.num_splits == 1 and launch.tokens is None
    assert launch.tiles.tolist() == [
        [i, row] for i, count in ((0, 40), (1, 33)) for row in range(0, 2 * count, launch.tile)
    ]


@pytest.mark.parametrize(("head_dim", "dtype"), [(576, torch.bfloat16), (256, torch.float32)], ids=str)
@pytest.mark.parametrize(("shared_bytes", "num_stages"), [(101376, 1), (166912, 3), (232448, 3)])
def test_wide_rows_fit_the_shared_memory_of_any_gpu(monkeypatch, shared_bytes, num_stages, head_dim, dtype):
    """Of compute capability 8.6, 8.9 and 12.0 where nothing is read ahead (test_kernels_compile.py)."""
    properties = SimpleNamespace(multi_processor_count=128, shared_memory_per_block_optin=shared_bytes)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    made = TritonAttention(AttentionShape(16, 1, head_dim, (None,), dtype, torch.device("cuda")))
    launched = {}
    empty = torch.empty(1, 1, 1, 1)
    table = SimpleNamespace(kv_lens=empty, query_starts=empty, block_ids=empty)
    plan = SimpleNamespace(
        layers=[(empty,) * 4], table=table, pool=SimpleNamespace(group=KVGroup("paged", 1, 1, head_dim, "bf16", 16))
    )
    attend = {(1, 1, 1): lambda *given, **named: launched.update(named)}
    made._kernels = SimpleNamespace(attend=attend)
    made._attend(plan, Launch(1, 16, 256, 1, 1, 1), 0, empty, empty, False)
    assert launched["num_stages"] == num_stages


def test_what_it_cannot_do_is_said(monkeypatch):
    wide = AttentionShape(4, 2, 640, (None,), torch.float32)
    assert BACKENDS["triton"].unfit(wide) in ("head_dim 640 is above 576", "needs a CUDA device")
    monkeypatch.setattr("baton.engine.kernels.INTERPRETED", False)
    shape = AttentionShape(4, 2, 64, (None,), torch.float32)
    assert BACKENDS["triton"].unfit(shape) == "needs a CUDA device"
    on_gpu = AttentionShape(4, 2, 64, (None,), torch.bfloat16, torch.device("cuda"), "fp8_e4m3")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 6))
    assert BACKENDS["triton"].unfit(on_gpu) == "the device has compute capability 8.6, needs 8.9"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert BACKENDS["triton"].unfit(on_gpu) == "triton is not installed: pip install triton"
