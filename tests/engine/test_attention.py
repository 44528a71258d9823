"""One suite over all attention backends: what they compute, what they read, and how one is chosen."""

import math

import pytest
import torch

from baton.engine.attention.base import AttentionShape
from baton.engine.attention.choice import BACKENDS, choose
from baton.engine.batch import ForwardBatch, SeqSlice
from baton.engine.kv.pool import KVPool
from kvtransfer.layout import KVGroup, KVLayout

WINDOW = 40


def exact(q, k, v, kv_len, window):
    """fp64 attention of the last len(q) tokens of a sequence: q [Q, Hq, D]; k, v [Hkv, kv_len, D]."""
    group = q.shape[1] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, dim=0) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(q.shape[2])
    distance = torch.arange(kv_len - len(q), kv_len).unsqueeze(1) - torch.arange(kv_len)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def one_step(shape: AttentionShape, lengths: list[tuple[int, int]], block_size: int = 16, form: str = "fp32"):
    """A pool with sequences of (query_len, kv_len); everything that no sequence owns is NaN."""
    torch.manual_seed(0)
    group = KVGroup("paged", len(shape.windows), shape.num_kv_heads, shape.head_dim, form, block_size)
    num_blocks = sum(-(-kv_len // block_size) for _, kv_len in lengths) + 3
    pool = KVPool(KVLayout((group,)), num_blocks)
    pool.blocks.fill_(float("nan"))
    free = torch.randperm(num_blocks)
    seqs, start = [], 0
    for query_len, kv_len in lengths:
        count = -(-kv_len // block_size)
        block_ids, free = free[:count], free[count:]
        slots = (block_ids.unsqueeze(1) * block_size + torch.arange(block_size)).view(-1)[:kv_len]
        for layer in range(len(shape.windows)):
            pool.write(layer, slots, *torch.randn(2, kv_len, shape.num_kv_heads, shape.head_dim))
        seqs.append(SeqSlice(start, query_len, kv_len, block_ids))
        start += query_len
    empty = torch.empty(0, dtype=torch.int64)
    q = torch.randn(start, shape.num_heads, shape.head_dim).to(shape.dtype)
    return pool, ForwardBatch(empty, empty, empty, seqs, empty), q


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("heads", [(4, 4, 16), (8, 2, 32), (5, 1, 24), (40, 1, 16)], ids=str)
@pytest.mark.parametrize("block_size", [8, 128])
def test_against_fp64(name, heads, block_size):
    """Chunks and decode tokens of many lengths in one step, a full and a windowed layer, garbage all around."""
    shape = AttentionShape(*heads, windows=(None, WINDOW), dtype=torch.float32)
    backend, _ = choose(name, shape)
    lengths = [(1, 1), (1, 64), (1, 65), (7, 7), (1, 300), (30, 200), (1, 513), (100, 612)]
    pool, batch, q = one_step(shape, lengths, block_size)
    plan = backend.plan(batch, pool)
    for layer, window in enumerate(shape.windows):
        out = torch.full_like(q, float("nan"))
        backend(plan, layer, q, out)
        for seq in batch.seqs:
            rows = slice(seq.query_start, seq.query_start + seq.query_len)
            truth = exact(q[rows], *pool.gather(layer, seq.block_ids, seq.kv_len), seq.kv_len, window)
            torch.testing.assert_close(out[rows].double(), truth, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("compute", "form"), [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16"), ("bf16", "fp32")])
def test_forms(name, compute, form):
    """The stored form may differ from the compute dtype."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[compute]
    shape = AttentionShape(4, 2, 32, windows=(None,), dtype=dtype)
    backend, _ = choose(name, shape)
    pool, batch, q = one_step(shape, [(1, 90), (20, 150)], form=form)
    out = torch.empty_like(q)
    backend(backend.plan(batch, pool), 0, q, out)
    for seq in batch.seqs:
        rows = slice(seq.query_start, seq.query_start + seq.query_len)
        truth = exact(q[rows], *pool.gather(0, seq.block_ids, seq.kv_len), seq.kv_len, None)
        torch.testing.assert_close(out[rows].double(), truth, atol=2e-2, rtol=0)


def test_auto_takes_the_fastest_and_says_why():
    shape = AttentionShape(4, 2, 32, windows=(None,), dtype=torch.float32)
    backend, reasons = choose("auto", shape)
    assert backend.name == "sdpa"
    assert reasons == {"reference": "sdpa was chosen"}


def test_what_cannot_be_exact_is_refused(monkeypatch):
    shape = AttentionShape(4, 2, 32, windows=(None,), dtype=torch.float32)
    monkeypatch.setattr("baton.engine.attention.sdpa.has_flash", lambda shape: False)
    backend, reasons = choose("auto", shape)
    assert backend.name == "reference" and "refused in batch-invariant mode" in reasons["sdpa"]
    with pytest.raises(ValueError, match="sdpa.*refused in batch-invariant mode"):
        choose("sdpa", shape)
    assert choose("sdpa", shape, batch_invariant=False)[0].name == "sdpa"


def test_unknown_backend():
    with pytest.raises(ValueError, match="'flush': one of auto, sdpa, reference"):
        choose("flush", AttentionShape(4, 2, 32, windows=(None,), dtype=torch.float32))
