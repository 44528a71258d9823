"""A step to attend over, and what comes of it in fp64."""

import torch

from baton.engine.attention.base import Attention, AttentionShape
from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.kv.pool import KVPool
from kvtransfer.layout import KVGroup, KVLayout

CAPPED = dict(given_scale=0.35, softcap=3.0)  # of AttentionShape, as Gemma 2 has them


def exact(q, k, v, kv_len, window, scale=None, softcap=None, sinks=None, chunked=False):
    """Return fp64 attention of the last len(q) tokens of a sequence: q [Q, Hq, D]; k, v [Hkv, kv_len, D]; sinks
    [Hq]."""
    group = q.shape[1] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, dim=0) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    positions = torch.arange(kv_len, device=q.device)
    queries = positions[kv_len - len(q) :].unsqueeze(1)
    first = 0
    if window is not None:
        first = queries - queries % window if chunked else queries - window + 1
    hidden = (positions > queries) | (positions < first)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return (scores.softmax(-1) @ v).transpose(0, 1)
    scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)), dim=2)
    return (scores.softmax(-1)[:, :, :-1] @ v).transpose(0, 1)


def one_step(
    shape: AttentionShape, lengths: list[tuple[int, int]], block_size: int = 16, form: str = "fp32", seed: int = 0,
    kind: str = "paged",
):  # fmt: skip
    """Return a pool with sequences of (query_len, kv_len); everything that no sequence owns is NaN."""
    torch.manual_seed(seed)
    group = KVGroup(kind, len(shape.windows), shape.num_kv_heads, shape.head_dim, form, block_size)
    num_blocks = sum(-(-kv_len // block_size) for _, kv_len in lengths) + 3
    pool = KVPool(KVLayout((group,)), num_blocks)
    pool.bytes.fill_(255)  # NaN in every form, or in its scales
    free = torch.randperm(num_blocks)
    seqs, start = [], 0
    for query_len, kv_len in lengths:
        count = -(-kv_len // block_size)
        block_ids, free = free[:count], free[count:]
        slots = (block_ids.unsqueeze(1) * block_size + torch.arange(block_size)).view(-1)[:kv_len]
        for layer in range(len(shape.windows)):
            pool.write(layer, slots, *torch.randn(group.num_kinds, kv_len, shape.num_kv_heads, shape.head_dim))
        seqs.append(SeqSlice(start, query_len, kv_len, block_ids))
        start += query_len
    q = torch.randn(start, shape.num_heads, shape.head_dim).to(shape.dtype)
    pool, q = on_device(pool, shape.device), q.to(shape.device)
    return pool, batch_of(seqs), q


def with_sinks(backend: Attention) -> Attention:
    """Give each head of each layer a sink, some larger than any score of random rows."""
    shape = backend.shape
    sinks = torch.randn(len(shape.windows), shape.num_heads, generator=torch.Generator().manual_seed(3)) * 4
    backend.set_sinks(sinks.to(shape.device))
    return backend


def on_device(pool: KVPool, device: torch.device) -> KVPool:
    if device.type == "cpu":
        return pool
    there = KVPool(pool.layout, pool.num_blocks, device=device)
    there.bytes.copy_(pool.bytes)
    return there


def batch_of(seqs: list[SeqSlice]) -> ForwardBatch:
    empty = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(empty, empty, empty, seqs, empty)


def attended(backend: Attention, pool: KVPool, batch: ForwardBatch, layer: int, q: torch.Tensor) -> torch.Tensor:
    """Return a backend's output of a step, filled with NaN before."""
    out = torch.full_like(q, float("nan"))
    backend(backend.plan(batch, pool), layer, q, out)
    return out


def assert_close_to_exact(backend: Attention, pool: KVPool, batch: ForwardBatch, q: torch.Tensor, atol: float):
    """Check the output in every layer of the shape."""
    for layer, window in enumerate(backend.shape.windows):
        out = attended(backend, pool, batch, layer, q)
        for seq in batch.seqs:
            rows = slice(seq.query_start, seq.query_start + seq.query_len)
            k, v = pool.gather(layer, seq.block_ids.to(q.device), seq.kv_len)
            given = (backend.shape.given_scale, backend.shape.softcap)
            sinks = backend.sinks[layer] if backend.shape.sinks else None
            truth = exact(q[rows], k, v, seq.kv_len, window, *given, sinks, backend.shape.chunked)
            torch.testing.assert_close(out[rows].double(), truth, atol=atol, rtol=0)
