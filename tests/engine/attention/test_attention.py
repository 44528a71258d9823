"""One suite over all attention backends: what they compute, what they read, and how one is chosen."""

import pytest
import torch

from baton.engine import native
from baton.engine.attention.base import AttentionShape
from baton.engine.attention.flash import unfit_rows
from baton.engine.attention.selection import BACKENDS, choose
from baton.engine.core.batch import SeqSlice
from baton.engine.kv.stored_forms import STORED
from tests.support.engine.attention.attention_step import (
    CAPPED,
    assert_close_to_exact,
    attended,
    batch_of,
    one_step,
    with_sinks,
)

WINDOW = 40
CPU_BACKENDS = ("native", "sdpa", "reference")  # test_attention_triton.py and test_attention_flash.py have the others
ON_CPU = {
    "flash3": "needs a CUDA device", "flash": "needs a CUDA device", "flash4": "needs a CUDA device", "triton-fast": "Triton's interpreter is for tests",
    "triton": "Triton's interpreter is for tests", "flashinfer": "needs a CUDA device",
}  # fmt: skip


def made(name: str, shape: AttentionShape):
    """The backend, or a skip that says why there is none."""
    if reason := BACKENDS[name].unfit(shape):
        pytest.skip(reason)
    return choose(name, shape)[0]


@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.parametrize("heads", [(4, 4, 16), (8, 2, 32), (5, 1, 24), (40, 1, 16), (3, 1, 48), (4, 2, 256)], ids=str)
@pytest.mark.parametrize("block_size", [8, 128])
def test_against_fp64(name, heads, block_size):
    """Chunks and decode tokens of many lengths in one step, a full and a windowed layer, garbage all around."""
    shape = AttentionShape(*heads, windows=(None, WINDOW), dtype=torch.float32)
    backend = made(name, shape)
    lengths = [(1, 1), (1, 64), (1, 65), (7, 7), (1, 300), (30, 200), (1, 513), (100, 612)]
    assert_close_to_exact(backend, *one_step(shape, lengths, block_size), atol=2e-6)


@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("form", STORED)
def test_every_stored_form_is_near_exact_attention(name, compute, form):
    """The stored form may differ from the compute dtype."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[compute]
    shape = AttentionShape(4, 2, 32, windows=(None,), dtype=dtype)
    backend = made(name, shape)
    assert_close_to_exact(backend, *one_step(shape, [(1, 90), (20, 150)], form=form), atol=2e-2)


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("compute, form", [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "int4")])
def test_a_given_scale_and_soft_cap(name, compute, form):
    """In a full and in a windowed layer; a row's bits stay its own."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[compute]
    shape = AttentionShape(4, 2, 32, (None, WINDOW), dtype, **CAPPED)
    backend = made(name, shape)
    pool, batch, q = one_step(shape, [(1, 1), (1, 90), (70, 200), (1, 300)], form=form)
    assert_close_to_exact(backend, pool, batch, q, atol=1e-5 if compute == "fp32" else 2e-2)
    chunk = batch.seqs[2]
    last = SeqSlice(0, 1, chunk.kv_len, chunk.block_ids)
    row = chunk.query_start + chunk.query_len - 1
    alone = attended(backend, pool, batch_of([last]), 1, q[row : row + 1].contiguous())
    assert torch.equal(alone[0], attended(backend, pool, batch, 1, q)[row])


@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.parametrize("compute, form", [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "int4")])
def test_latent_rows_are_keys_and_values_of_all_heads(name, compute, form):
    """One row a token is key and value of all heads."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[compute]
    backend = made(name, AttentionShape(16, 1, 80, (None, None), dtype, given_scale=0.1))
    step = one_step(backend.shape, [(1, 1), (1, 90), (30, 100)], form=form, kind="latent")
    assert_close_to_exact(backend, *step, atol=2e-6 if compute == "fp32" else 2e-2)


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("compute, form", [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "int8")])
def test_sinks_are_near_exact_attention(name, compute, form):
    """Each head's own, in a full and in a windowed layer; a row's bits stay its own."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[compute]
    backend = with_sinks(made(name, AttentionShape(6, 2, 32, (None, WINDOW), dtype, sinks=True)))
    pool, batch, q = one_step(backend.shape, [(1, 1), (1, 90), (70, 200), (1, 300)], form=form)
    assert_close_to_exact(backend, pool, batch, q, atol=1e-5 if compute == "fp32" else 2e-2)
    chunk = batch.seqs[2]
    last = SeqSlice(0, 1, chunk.kv_len, chunk.block_ids)
    row = chunk.query_start + chunk.query_len - 1
    for layer in range(2):
        alone = attended(backend, pool, batch_of([last]), layer, q[row : row + 1].contiguous())
        assert torch.equal(alone[0], attended(backend, pool, batch, layer, q)[row])


@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.parametrize("compute, form", [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "int8")])
def test_tokens_attend_to_their_own_chunk_alone(name, compute, form):
    """Tokens see their own chunk alone, across spans and behind them; a row's bits stay its own."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[compute]
    backend = made(name, AttentionShape(6, 2, 32, (WINDOW, 130), dtype, chunked=True))
    lengths = [(1, 1), (1, WINDOW), (1, WINDOW + 1), (70, 200), (1, 300), (1, 261)]
    pool, batch, q = one_step(backend.shape, lengths, form=form)
    assert_close_to_exact(backend, pool, batch, q, atol=1e-5 if compute == "fp32" else 2e-2)
    chunk = batch.seqs[3]
    last = SeqSlice(0, 1, chunk.kv_len, chunk.block_ids)
    row = chunk.query_start + chunk.query_len - 1
    alone = attended(backend, pool, batch_of([last]), 1, q[row : row + 1].contiguous())
    assert torch.equal(alone[0], attended(backend, pool, batch, 1, q)[row])
    assert unfit_rows(backend.shape) == "has no chunks"


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_rows_that_see_a_nan_key_are_nan(name, form, softcap):
    """As an activation that overflowed leaves it: such an answer must not look well."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[form]
    backend = made(name, AttentionShape(4, 2, 32, (None,), dtype, softcap=softcap))
    pool, batch, q = one_step(backend.shape, [(20, 150), (1, 90)], form=form)
    position, block_ids = 140, batch.seqs[0].block_ids
    slot = block_ids[position // 16] * 16 + position % 16
    pool.write(0, slot.view(1), torch.full((1, 2, 32), float("nan")), torch.ones(1, 2, 32))
    is_none = attended(backend, pool, batch, 0, q).isnan().all(dim=2).all(dim=1)
    assert is_none.tolist() == [130 + row >= position for row in range(20)] + [False]


def test_who_has_no_sinks():
    _, reasons = choose("auto", AttentionShape(4, 2, 24, (None,), torch.float32, sinks=True))
    assert reasons["sdpa"] == "torch's kernel has no sinks"
    assert unfit_rows(AttentionShape(4, 2, 64, (None,), torch.bfloat16, sinks=True)) == "has no sinks"


def test_torch_has_no_soft_cap():
    shape = AttentionShape(4, 2, 24, (None,), torch.float32, softcap=50.0)
    backend, reasons = choose("auto", shape)
    assert backend.name == "reference" and reasons["sdpa"] == "torch's kernel has no soft cap"
    scaled = AttentionShape(4, 2, 24, (None, WINDOW), torch.float32, given_scale=0.35)
    assert_close_to_exact(made("sdpa", scaled), *one_step(scaled, [(1, 90), (70, 200)]), atol=2e-6)


def test_auto_takes_the_first_that_fits_and_says_why(monkeypatch):
    fits = AttentionShape(4, 2, 32, windows=(None,), dtype=torch.float32)
    odd = AttentionShape(4, 2, 24, windows=(None,), dtype=torch.float32)
    if native.library() is not None:
        backend, reasons = choose("auto", fits)
        assert backend.name == "native" and reasons == dict.fromkeys(
            [*ON_CPU, "sdpa", "reference"], "native was chosen"
        )
        backend, reasons = choose("auto", odd)
        assert backend.name == "sdpa"
        assert reasons == ON_CPU | {"native": "head_dim 24 is not a multiple of 16", "reference": "sdpa was chosen"}
    monkeypatch.setattr("baton.engine.native.library", lambda: None)
    monkeypatch.setattr("baton.engine.native.unavailable", lambda: "no compiler")
    backend, reasons = choose("auto", fits)
    assert backend.name == "sdpa" and reasons == ON_CPU | {"native": "no compiler", "reference": "sdpa was chosen"}
    with pytest.raises(ValueError, match="'native': no compiler; what fits: sdpa, reference"):
        choose("native", fits)


def test_what_cannot_be_exact_is_refused(monkeypatch):
    shape = AttentionShape(4, 2, 24, windows=(None,), dtype=torch.float32)
    monkeypatch.setattr("baton.engine.attention.sdpa.has_flash", lambda shape: False)
    backend, reasons = choose("auto", shape)
    assert backend.name == "reference" and "refused in batch-invariant mode" in reasons["sdpa"]
    with pytest.raises(ValueError, match="sdpa.*refused in batch-invariant mode"):
        choose("sdpa", shape)
    assert choose("sdpa", shape, batch_invariant=False)[0].name == "sdpa"


def test_unknown_backend():
    with pytest.raises(
        ValueError,
        match="'flush': one of auto, native, flash3, flash, triton-fast, triton, flash4, flashinfer, sdpa, reference",
    ):
        choose("flush", AttentionShape(4, 2, 32, windows=(None,), dtype=torch.float32))


def test_a_gpu_backend_without_a_gpu():
    """One line that says what would fit; a worker ends with it and 2."""
    shape = AttentionShape(4, 2, 32, windows=(None,), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="'flash': needs a CUDA device; what fits: (native, )?sdpa, reference$"):
        choose("flash", shape)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_torch_on_a_gpu(name):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", 0)
    shape = AttentionShape(8, 2, 64, windows=(None, WINDOW), dtype=torch.bfloat16, device=device)
    backend, _ = choose(name, shape, batch_invariant=False)
    step = one_step(shape, [(1, 90), (20, 150)], form="bf16")
    with device:
        assert_close_to_exact(backend, *step, atol=2e-2)
    with pytest.raises(ValueError, match="refused in batch-invariant mode"):
        choose(name, shape)
