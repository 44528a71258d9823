"""Attention by FlashAttention: flash-attn 2.x (Dao 2023), FlashAttention-3 (Shah et al. 2024) and flash-attn 4.
They read the pool in place: pages are blocks, seen as [blocks, tokens, kv heads, head_dim].

Versions 2 and 3 split KV by the load, so a row's bits depend on what shares its batch. Version 4 splits only
when told.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import Attention, AttentionShape, unfit_cuda
from baton.engine.core.batch import ForwardBatch, SeqSlice, SeqTable
from baton.engine.core.device import sent
from baton.engine.kv.pool import DTYPES, KVPool
from baton.lines import one_line

FEW_QUERIES = 32  # queries of a sequence up to which flash_attn_with_kvcache is used
PAGE_MULTIPLE = 256  # tokens that flash-attn 2.x wants a page to be a multiple of
HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 8, 256


@dataclass(frozen=True, slots=True)
class FlashCall:
    """Describe the sequences of one call. `rows`: their rows in the batch; None: all rows."""

    rows: Tensor | None
    table: SeqTable
    # int32 [S + 1], where each sequence's tokens would begin if they lay in a row; None if not needed.
    key_starts: Tensor | None


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """Hold the calls of a step and the pool."""

    parts: tuple[FlashCall, ...]
    pool: KVPool


class FlashAttention2(Attention):
    """Attend by flash-attn 2.x: chunks use `flash_attn_varlen_func`, decode and verification
    `flash_attn_with_kvcache`."""

    name = "flash"
    batch_invariant = False
    capturable = True

    def __init__(self, shape: AttentionShape):
        super().__init__(shape)
        module = load("flash_attn")
        self._chunks: Callable[..., Tensor] = module.flash_attn_varlen_func
        self._cached: Callable[..., Tensor] = module.flash_attn_with_kvcache

    @classmethod
    def unfit(cls, shape: AttentionShape) -> str:
        if (
            reason := unfit_cuda(shape.device, (8, 0))
            or unimportable("flash_attn", "flash_attn_varlen_func", "--no-build-isolation flash-attn==2.8.3.post2")
            or unfit_rows(shape)
        ):
            return reason
        if shape.block_size % PAGE_MULTIPLE:
            return f"block_size {shape.block_size} is not a multiple of {PAGE_MULTIPLE}"
        return ""

    def plan(self, batch: ForwardBatch, pool: KVPool) -> FlashPlan:
        table = batch.table or SeqTable.of(batch.seqs, pool.bytes.device)
        if all(seq.query_len == table.max_query_len for seq in batch.seqs):
            few = table.max_query_len <= FEW_QUERIES
            starts = None if few else F.pad(table.kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
            return FlashPlan((FlashCall(None, table, starts),), pool)
        one = [i for i, seq in enumerate(batch.seqs) if seq.query_len == 1]
        more = [i for i, seq in enumerate(batch.seqs) if seq.query_len > 1]
        return FlashPlan(tuple(part_of(batch.seqs, members, table) for members in (one, more) if members), pool)

    def __call__(self, plan: FlashPlan, layer: int, q: Tensor, out: Tensor) -> None:
        for part in plan.parts:
            if part.rows is None:
                out.copy_(self._part(plan.pool, layer, part, q))
            else:
                out[part.rows] = self._part(plan.pool, layer, part, q[part.rows])

    def _part(self, pool: KVPool, layer: int, part: FlashCall, q: Tensor) -> Tensor:
        table = part.table
        k, v = pages(pool, layer)
        options = {"softmax_scale": self.shape.scale, "causal": True, "window_size": self._window(layer)}
        options |= self._softcap
        if part.key_starts is None:
            rows = q.unflatten(0, (-1, table.max_query_len))
            cached = self._cached(rows, k, v, cache_seqlens=table.kv_lens, block_table=table.block_ids, **options)
            return cached.flatten(0, 1)
        return self._chunks(
            q, k, v, table.query_starts, part.key_starts, table.max_query_len, table.max_kv_len,
            block_table=table.block_ids, **options,
        )  # fmt: skip

    @property
    def _softcap(self) -> dict[str, float]:
        """Return the softcap as flash-attn (since 2.6) takes it; empty without one."""
        return {} if self.shape.softcap is None else {"softcap": self.shape.softcap}

    def _window(self, layer: int) -> tuple[int, int]:
        """Return the window as flash-attn counts it: positions to the left and to the right of a token."""
        window = self.shape.windows[layer]
        return (-1, -1) if window is None else (window - 1, 0)


class FlashAttention3(FlashAttention2):
    """Attend by FlashAttention-3, in one call per step and with any page size. Its module is built from the `hopper`
    folder of flash-attention."""

    name = "flash3"

    def __init__(self, shape: AttentionShape):
        Attention.__init__(self, shape)
        self._cached = load("flash_attn_interface").flash_attn_with_kvcache

    @classmethod
    def unfit(cls, shape: AttentionShape) -> str:
        reason = unfit_cuda(shape.device, (9, 0), below=(10, 0))
        return reason or unimportable("flash_attn_interface", "flash_attn_with_kvcache") or unfit_rows(shape)

    def plan(self, batch: ForwardBatch, pool: KVPool) -> FlashPlan:
        return FlashPlan((FlashCall(None, batch.table or SeqTable.of(batch.seqs, pool.bytes.device), None),), pool)

    def _part(self, pool: KVPool, layer: int, part: FlashCall, q: Tensor) -> Tensor:
        table = part.table
        return self._cached(
            q, *pages(pool, layer), cache_seqlens=table.kv_lens, page_table=table.block_ids,
            cu_seqlens_q=table.query_starts, max_seqlen_q=table.max_query_len, softmax_scale=self.shape.scale,
            causal=True, window_size=self._window(layer), **self._softcap,
        )  # fmt: skip


class FlashAttention4(FlashAttention2):
    """Attend by flash-attn 4 on Hopper, in one call per step and with any page size. KV is not split, and the tile
    there depends on the model's shape alone (`_tile_size_fwd_sm90` of flash_attn/cute/interface.py, 4.0.0b36), so a
    row's bits do not depend on what shares its batch."""

    name = "flash4"
    batch_invariant = True

    def __init__(self, shape: AttentionShape):
        Attention.__init__(self, shape)
        self._chunks = load("flash_attn.cute").flash_attn_varlen_func

    @classmethod
    def unfit(cls, shape: AttentionShape) -> str:
        reason = unfit_cuda(shape.device, (9, 0), below=(10, 0))
        return reason or unimportable("flash_attn.cute", "flash_attn_varlen_func", "flash-attn-4") or unfit_rows(shape)

    def plan(self, batch: ForwardBatch, pool: KVPool) -> FlashPlan:
        return FlashPlan((FlashCall(None, batch.table or SeqTable.of(batch.seqs, pool.bytes.device), None),), pool)

    def _part(self, pool: KVPool, layer: int, part: FlashCall, q: Tensor) -> Tensor:
        table, (left, right) = part.table, self._window(layer)
        out, _ = self._chunks(
            q, *pages(pool, layer), cu_seqlens_q=table.query_starts, max_seqlen_q=table.max_query_len,
            max_seqlen_k=table.max_kv_len, seqused_k=table.kv_lens, page_table=table.block_ids,
            softmax_scale=self.shape.scale, causal=True, window_size=(None, None) if left < 0 else (left, right),
            num_splits=1, **self._softcap,
        )  # fmt: skip
        return out


def pages(pool: KVPool, layer: int) -> tuple[Tensor, Tensor]:
    """Return views k and v [blocks, tokens, kv heads, head_dim] of the pool."""
    return pool.blocks[:, layer, 0].transpose(1, 2), pool.blocks[:, layer, -1].transpose(1, 2)


def part_of(seqs: list[SeqSlice], members: list[int], table: SeqTable) -> FlashCall:
    """Return a call for some sequences of a step, with their rows in a row."""
    device = table.kv_lens.device
    chosen = [seqs[i] for i in members]
    rows = [row for seq in chosen for row in range(seq.query_start, seq.query_start + seq.query_len)]
    lens = torch.tensor([[seq.query_len for seq in chosen], [seq.kv_len for seq in chosen]])
    starts = sent(F.pad(lens.cumsum(1), (1, 0)).int(), device)
    query_len, kv_len = lens.amax(1).tolist()
    index = sent(torch.tensor(members), device)
    own = SeqTable(starts[0], table.kv_lens[index], table.block_ids[index], query_len, kv_len)
    return FlashCall(sent(torch.tensor(rows), device), own, starts[1] if query_len > 1 else None)


def unfit_rows(shape: AttentionShape) -> str:
    """Return which dtype, head dimension, stored form or sinks of the model no version supports; "" if it is
    supported."""
    if shape.sinks:
        return "has no sinks"
    if shape.chunked:
        return "has no chunks"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return "computes in bf16 or fp16"
    if shape.head_dim % HEAD_DIM_MULTIPLE or shape.head_dim > MAX_HEAD_DIM:
        return f"head_dim {shape.head_dim} is not a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}"
    if shape.kv_form and DTYPES.get(shape.kv_form) != shape.dtype:
        return f"reads KV in the compute dtype, {shape.kv_form} is stored"
    return ""


def load(name: str) -> ModuleType:
    """Import a module of flash-attn."""
    return importlib.import_module(name)


def unimportable(name: str, function: str, package: str = "") -> str:
    """Return why a module with this function cannot be imported, whatever its import raises; "" if it can. flash-attn 4
    alone leaves a `flash_attn` without the functions of flash-attn 2."""
    try:
        if hasattr(load(name), function):
            return ""
    except ModuleNotFoundError:
        pass
    # It may be built for another torch, lack the libraries it opens, or want to write to a read-only folder.
    except Exception as error:
        return f"{name} does not load: {one_line(error)}"
    return f"{name} is not installed" + (f": pip install {package}" if package else "")
