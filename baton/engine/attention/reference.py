"""Attention in plain torch: the version to read, and the one that other backends are tested against.

It computes one sequence at a time in fp32, in spans of 64 absolute positions in order, with a running maximum and sum.
Rows are padded to a multiple of 16, which keeps the matrix products on one path, so a row's bits do not depend on the
others.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import Attention, AttentionShape, visible
from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.kv.pool import KVPool

SPAN = 64
ROWS = 16


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """Hold the batch of a step and the pool."""

    batch: ForwardBatch
    pool: KVPool


class ReferenceAttention(Attention):
    """Attend in fp32 whatever the compute dtype; on a CPU exact for any number of rows."""

    name = "reference"

    def __init__(self, shape: AttentionShape):
        super().__init__(shape)
        self.batch_invariant = shape.device.type == "cpu"

    def plan(self, batch: ForwardBatch, pool: KVPool) -> ReferencePlan:
        return ReferencePlan(batch, pool)

    def __call__(self, plan: ReferencePlan, layer: int, q: Tensor, out: Tensor) -> None:
        for seq in plan.batch.seqs:
            rows = slice(seq.query_start, seq.query_start + seq.query_len)
            out[rows] = self._sequence(plan.pool, layer, seq, q[rows].float())

    def _sequence(self, pool: KVPool, layer: int, seq: SeqSlice, q: Tensor) -> Tensor:
        """Attend for one sequence, q [query_len, num_heads, head_dim] -> the same shape."""
        k, v = pool.gather(layer, seq.block_ids, seq.kv_len)
        missing = -seq.kv_len % SPAN
        k, v = (F.pad(x.float(), (0, 0, 0, missing)) for x in (k, v))
        rows, positions = self._rows(q, seq)
        maximum, total = self._begun(layer, rows)
        result = torch.zeros_like(rows)
        for begin in range(0, seq.kv_len, SPAN):
            keys, values = k[:, begin : begin + SPAN], v[:, begin : begin + SPAN]
            span = torch.arange(begin, begin + SPAN, device=q.device)
            seen = visible(positions, span, self.shape.windows[layer], self.shape.chunked)
            scores = torch.matmul(rows, keys.transpose(1, 2)) * self.shape.scale
            if self.shape.softcap is not None:
                scores = torch.tanh(scores / self.shape.softcap) * self.shape.softcap
            scores = scores.masked_fill(~seen, float("-inf"))
            new_maximum = torch.maximum(maximum, scores.amax(dim=2, keepdim=True))
            # A row that has seen no key has no maximum; 0 makes its exponentials zero instead of NaN.
            finite = new_maximum.masked_fill(new_maximum == float("-inf"), 0.0)
            kept, weights = torch.exp(maximum - finite), torch.exp(scores - finite)
            total = total * kept + weights.sum(dim=2, keepdim=True)
            result = result * kept + torch.matmul(weights, values)
            maximum = new_maximum
        return self._tokens(result / total, seq.query_len)

    def _begun(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maximum and sum of rows before any key, [num_kv_heads, rows, 1]: those of their head's sink."""
        if not self.shape.sinks:
            return rows.new_full((*rows.shape[:2], 1), float("-inf")), rows.new_zeros(*rows.shape[:2], 1)
        shape = self.shape
        heads = torch.arange(rows.shape[1], device=rows.device) % shape.group_size
        maximum = self.sinks[layer].view(shape.num_kv_heads, shape.group_size)[:, heads].unsqueeze(2)
        return maximum, torch.ones_like(maximum)

    def _rows(self, q: Tensor, seq: SeqSlice) -> tuple[Tensor, Tensor]:
        """Return the queries, grouped by KV head, [num_kv_heads, rows, head_dim], and the position of each row."""
        shape = self.shape
        rows = q.view(seq.query_len, shape.num_kv_heads, shape.group_size, shape.head_dim).transpose(0, 1)
        rows = rows.reshape(shape.num_kv_heads, -1, shape.head_dim)
        positions = torch.arange(seq.kv_len - seq.query_len, seq.kv_len, device=q.device)
        positions = positions.repeat_interleave(shape.group_size)
        missing = -rows.shape[1] % ROWS
        return F.pad(rows, (0, 0, 0, missing)), F.pad(positions, (0, missing))

    def _tokens(self, rows: Tensor, query_len: int) -> Tensor:
        shape = self.shape
        rows = rows[:, : query_len * shape.group_size].unflatten(1, (query_len, shape.group_size))
        return rows.transpose(0, 1).reshape(query_len, shape.num_heads, shape.head_dim)
