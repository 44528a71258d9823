"""Attention by FlashInfer (Ye et al. 2025). Its paged prefill, which takes decode tokens too, reads the pool in place,
with blocks as pages of [kv heads, tokens, head_dim] (HND).

A step is planned on the host, once for all layers with the same window, so it cannot be captured in a CUDA graph; and
KV is split by the load, so a row's bits depend on what shares its batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.engine.attention.base import Attention, AttentionShape, unfit_cuda
from baton.engine.attention.flash import load, unfit_rows, unimportable
from baton.engine.core.batch import ForwardBatch, SeqTable
from baton.engine.kv.pool import KVPool

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 256 << 20  # for partial results; FlashInfer's examples use 128 MiB


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """Hold the wrappers, which keep their own plan, so that there is one step at a time."""

    pool: KVPool


class FlashInferAttention(Attention):
    """Attend by FlashInfer, with one wrapper for each window of the model's layers."""

    name = "flashinfer"
    batch_invariant = False

    def __init__(self, shape: AttentionShape):
        super().__init__(shape)
        module = load("flashinfer")
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        make = module.BatchPrefillWithPagedKVCacheWrapper
        self._wrappers: dict[int | None, Any] = {window: make(workspace, "HND") for window in set(shape.windows)}

    @classmethod
    def unfit(cls, shape: AttentionShape) -> str:
        absent = unimportable("flashinfer", "BatchPrefillWithPagedKVCacheWrapper", "flashinfer-python")
        if reason := unfit_cuda(shape.device, (8, 0)) or absent or unfit_rows(shape):
            return reason
        if shape.head_dim not in HEAD_DIMS:
            return f"head_dim {shape.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        return ""

    def plan(self, batch: ForwardBatch, pool: KVPool) -> FlashInferPlan:
        shape, size, seqs = self.shape, pool.block_size, batch.seqs
        table = batch.table or SeqTable.of(seqs, shape.device)
        counts = [pool.layout.num_blocks(seq.kv_len) for seq in seqs]
        width = table.block_ids.shape[1]
        places = [row * width + column for row, count in enumerate(counts) for column in range(count)]
        pages = table.block_ids.reshape(-1)[_ints(places).to(shape.device)]
        starts = _ints([*(seq.query_start for seq in seqs), seqs[-1].query_start + seqs[-1].query_len])
        page_starts = _ints([0, *counts]).cumsum(0, dtype=torch.int32)
        last_pages = _ints([seq.kv_len - (count - 1) * size for seq, count in zip(seqs, counts, strict=True)])
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                starts, page_starts, pages, last_pages, shape.num_heads, shape.num_kv_heads, shape.head_dim, size,
                causal=True, sm_scale=shape.scale, window_left=-1 if window is None else window - 1,
                q_data_type=shape.dtype, kv_data_type=shape.dtype, logits_soft_cap=shape.softcap,
            )  # fmt: skip
        return FlashInferPlan(pool)

    def __call__(self, plan: FlashInferPlan, layer: int, q: Tensor, out: Tensor) -> None:
        k, v = plan.pool.blocks[:, layer, 0], plan.pool.blocks[:, layer, -1]
        self._wrappers[self.shape.windows[layer]].run(q, (k, v), out=out)


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")
