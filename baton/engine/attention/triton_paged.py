"""Attention in Triton (kernels/paged_attention.py): it reads the pool in place, in any stored form.

Sequences with few queries (decode, verification of drafts) are split along KV to fill the GPU; chunks are not. If there
are enough sequences to fill it, the splits of sequences much longer than the others are dealt out to programs that
share them, by lengths that only the device knows. The fixed form splits at fixed borders and has one tile size for
both, so a row has the same bits either way. The fast form has a small tile for decode, a large one for chunks, and as
many splits as the load needs; the device derives their length from each sequence's own, since a graph is made for the
longest context and used for short ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from baton.engine import kernels
from baton.engine.attention.base import Attention, AttentionShape, unfit_cuda
from baton.engine.core.batch import ForwardBatch, SeqSlice, SeqTable
from baton.engine.core.device import sent
from baton.engine.kv.pool import KVPool
from kvtransfer.layout import KV_FORMS

# Positions that a program reduces at a time. At 64 a tile spills 8 to 208 bytes of registers per thread on compute
# capability 9.0 (tests/engine/kernels/sm90.json).
BLOCK_N = 32
FEW_QUERIES = 32  # queries of a sequence up to which KV may be split
FIXED_TILE = 64  # rows; a warp group on Hopper multiplies no fewer
FIXED_SPLIT = 256  # positions
FAST_FEW_TILE = 16  # rows; tl.dot takes no fewer
FAST_CHUNK_TILE = 128
FAST_MIN_SPLIT = 128  # positions
PROGRAMS_PER_PROCESSOR = 2  # with fewer programs KV is split
MAX_PROGRAMS_PER_PROCESSOR = 8  # of those that share the splits of a step; each takes several of a long context
# Up to WIDE_HEAD_DIM elements, a row of fp32 sums fits the registers of a tile above. Longer rows, up to the latent
# ones of DeepSeek, use the smallest tile: it takes LATENT_BYTES of shared memory in bf16, or 99,328 if the next KV is
# not read ahead. So does fp32 if a block has less memory: tiles of 128 rows of 128 elements take 115,328, of 32 rows of
# 256 102,656.
WIDE_HEAD_DIM, MAX_HEAD_DIM, LATENT_BYTES = 256, 576, 164992
NUM_STAGES = 3  # read ahead; Triton's own choice
# For dealing out (kernels/paged_attention.py, `deal`): positions of a split in the fast form, splits that one program
# walks in any case, tiles that are looked at, and splits of a step: 524,288 positions, 34 MB of partial results of an
# 8B model.
FAST_DEALT_SPLIT, MIN_DEALT, MAX_TILES, MAX_ITEMS = 512, 4, 1024, 2048


@dataclass(frozen=True, slots=True)
class Launch:
    """Describe sequences that run alike: all of the batch, with `query_len` tokens each, or those that `tiles` and
    `tokens` name."""

    num_tiles: int
    tile: int  # rows
    split_len: int  # 0: derived from each sequence's length
    num_splits: int  # of the longest sequence; 1: nothing to combine
    num_programs: int  # programs that share the splits of a tile
    num_tokens: int  # tokens to combine
    query_len: int = 0
    tiles_per_seq: int = 0
    tiles: Tensor | None = None  # int32 [num_tiles, 2]: sequence, first row of its queries
    # int32 [num_tokens, 5]: row in the batch, position, sequence length, place in the sequence, first tile of the
    # sequence
    tokens: Tensor | None = None
    partials: Tensor | None = None  # fp32 [T, heads, splits, head_dim]; dealt: [items, kv heads, tile_rows, head_dim]
    stats: Tensor | None = None  # like partials, with a last dimension of 2
    items: Tensor | None = None  # int32 [num_tiles + 1]: the first split of each tile, if dealt out
    owners: Tensor | None = None  # int32 [items]: the tile of each split
    num_sharing: int = 0  # programs of a KV head that share the splits; 0: none are dealt out
    most_items: int = 0
    tile_rows: int = 0


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Hold the launches of a step, and the pool's tensors for each layer."""

    table: SeqTable
    launches: tuple[Launch, ...]
    layers: list[tuple[Tensor, Tensor, Tensor, Tensor]]  # k, v and their scales
    pool: KVPool


class TritonAttention(Attention):
    """Attend in Triton, exactly: with fixed tiles, and splits at fixed borders."""

    name = "triton"
    batch_invariant = True
    capturable = True
    _dealt_split = FIXED_SPLIT

    def __init__(self, shape: AttentionShape):
        from baton.engine.kernels import paged_attention  # triton is an optional dependency

        super().__init__(shape)
        self._kernels = paged_attention
        # Weak keys, so that a pool made only for measuring is freed.
        self._layers: WeakKeyDictionary[KVPool, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = WeakKeyDictionary()
        # Factors on scores for base-2 exponentials. With a softcap: the factor that gives the exponent of the tanh, and
        # the cap.
        self._scales = (shape.scale * paged_attention.LOG2_E, 0.0)
        if shape.softcap is not None:
            cap = shape.softcap
            self._scales = (2 * shape.scale / cap * paged_attention.LOG2_E, cap * paged_attention.LOG2_E)
        self._block_d = max(16, 1 << (shape.head_dim - 1).bit_length())
        processors, self._num_stages = 8, NUM_STAGES
        if shape.device.type == "cuda":
            properties = torch.cuda.get_device_properties(shape.device)
            processors = properties.multi_processor_count
            is_wide = shape.head_dim > WIDE_HEAD_DIM or shape.dtype == torch.float32
            if is_wide and shared_bytes(properties) < LATENT_BYTES:
                self._num_stages = 1
        self._wanted, self._most = (each * processors for each in (PROGRAMS_PER_PROCESSOR, MAX_PROGRAMS_PER_PROCESSOR))

    @classmethod
    def unfit(cls, shape: AttentionShape) -> str:
        if reason := kernels.unavailable(shape.device.type):
            return reason
        if shape.chunked:
            return "has no chunks"
        least = (8, 9) if shape.kv_form == "fp8_e4m3" else (8, 0)
        if shape.device.type == "cuda" and (reason := unfit_cuda(shape.device, least)):
            return reason
        if shape.head_dim > WIDE_HEAD_DIM and shape.device.type == "cuda" and shape.dtype == torch.float32:
            return f"head_dim {shape.head_dim} is above {WIDE_HEAD_DIM}, in fp32"
        return f"head_dim {shape.head_dim} is above {MAX_HEAD_DIM}" if shape.head_dim > MAX_HEAD_DIM else ""

    @classmethod
    def avoid(cls, shape: AttentionShape) -> str:
        return "" if shape.device.type == "cuda" else "Triton's interpreter is for tests"

    # ---- the plan ----

    def plan(self, batch: ForwardBatch, pool: KVPool) -> TritonPlan:
        if (layers := self._layers.get(pool)) is None:
            layers = self._layers[pool] = layers_of(pool)
        table = batch.table or SeqTable.of(batch.seqs, pool.bytes.device)
        if all(seq.query_len == table.max_query_len for seq in batch.seqs):
            launches = (self._uniform_launch(table, pool.group.form),)
        else:
            few = [i for i, seq in enumerate(batch.seqs) if seq.query_len <= FEW_QUERIES]
            many = [i for i, seq in enumerate(batch.seqs) if seq.query_len > FEW_QUERIES]
            form = pool.group.form
            launches = tuple(self._launch(batch.seqs, members, table, form) for members in (few, many) if members)
        return TritonPlan(table, launches, layers, pool)

    def _uniform_launch(self, table: SeqTable, form: str) -> Launch:
        """Return a launch that depends on bounds alone, as a CUDA graph needs it."""
        num_seqs, query_len = len(table.kv_lens), table.max_query_len
        tile = self._tile(query_len, form)
        per_seq = -(-query_len * self.shape.group_size // tile)
        made = self._made(num_seqs * per_seq, tile, query_len, table.max_kv_len, num_seqs * query_len)
        made = replace(made, query_len=query_len, tiles_per_seq=per_seq)
        return self._with_scratch(made, table, num_seqs * query_len, min(tile, query_len * self.shape.group_size))

    def _launch(self, seqs: Sequence[SeqSlice], members: list[int], table: SeqTable, form: str) -> Launch:
        device, size = table.kv_lens.device, self.shape.group_size
        query_len, kv_len = (max(getattr(seqs[i], name) for i in members) for name in ("query_len", "kv_len"))
        tile = self._tile(query_len, form)
        tiles, tokens, num_rows = [], [], 0
        num_tokens = sum(seqs[i].query_len for i in members)
        num_tiles = sum(-(-seqs[i].query_len * size // tile) for i in members)
        made = self._made(num_tiles, tile, query_len, kv_len, num_tokens)
        combines = made.num_splits > 1 or made.num_sharing > 0
        for i in members:
            start, count, length, first_tile = seqs[i].query_start, seqs[i].query_len, seqs[i].kv_len, len(tiles)
            num_rows = max(num_rows, start + count)
            tiles += [(i, row) for row in range(0, count * size, tile)]
            if combines:
                tokens += [(start + t, length - count + t, length, t, first_tile) for t in range(count)]
        made = replace(made, tiles=_sent(tiles, device), tokens=_sent(tokens, device) if combines else None)
        return self._with_scratch(made, table, num_rows, tile)

    def _made(self, num_tiles: int, tile: int, query_len: int, longest: int, num_tokens: int) -> Launch:
        """Return a launch without its tensors."""
        split_len, num_splits, num_programs = self._splits(num_tiles, query_len, longest)
        if num_splits > 1 or query_len > FEW_QUERIES or num_tiles > MAX_TILES:
            return Launch(num_tiles, tile, split_len, num_splits, num_programs, num_tokens)
        num_sharing = max(1, self._wanted // self.shape.num_kv_heads)
        split_len, most = self._dealt_split, max(1, min(MAX_ITEMS, num_tiles * -(-longest // self._dealt_split)))
        return Launch(num_tiles, tile, split_len, 1, 1, num_tokens, num_sharing=num_sharing, most_items=most)

    def _with_scratch(self, launch: Launch, table: SeqTable, num_rows: int, tile_rows: int) -> Launch:
        """Return the launch with memory for partial results, and with the splits of long sequences dealt out."""
        device, shape = table.kv_lens.device, self.shape
        if launch.num_sharing == 0:
            places = (num_rows, shape.num_heads, launch.num_splits)
            return launch if launch.num_splits == 1 else replace(launch, **self._scratch(places, device))
        sizes = {"items": launch.num_tiles + 1, "owners": launch.most_items}
        dealt = {name: torch.empty(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
        self._kernels.deal[(launch.num_tiles,)](
            _or(launch.tiles, table.kv_lens), table.kv_lens, dealt["items"], dealt["owners"], launch.num_tiles,
            launch.tiles_per_seq, launch.split_len, launch.num_sharing, launch.most_items,
            MIN=MIN_DEALT, BLOCK=MAX_TILES,
        )  # fmt: skip
        scratch = self._scratch((launch.most_items, shape.num_kv_heads, tile_rows), device)
        return replace(launch, tile_rows=tile_rows, **dealt, **scratch)

    def _scratch(self, places: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
        sizes = {"partials": self.shape.head_dim, "stats": 2}
        return {name: torch.empty(*places, size, device=device) for name, size in sizes.items()}

    def _tile(self, query_len: int, form: str) -> int:
        return min(FIXED_TILE, self._most_rows(form))

    def _most_rows(self, form: str) -> int:
        """Return the most rows of a tile with which no program spills registers on compute capability 9.0: with 64 it
        spilled 16 to 216 bytes a thread at head_dim 256."""
        if self._block_d <= 128:
            return FAST_CHUNK_TILE
        return FAST_FEW_TILE if KV_FORMS[form].bits < 8 or self.shape.head_dim > WIDE_HEAD_DIM else 32

    def _splits(self, num_tiles: int, query_len: int, longest: int) -> tuple[int, int, int]:
        """Return (length of a split, number of splits, programs that share them); with 1 split a program takes a whole
        row."""
        num_programs = num_tiles * self.shape.num_kv_heads
        if num_programs >= self._wanted or query_len > FEW_QUERIES:
            return FIXED_SPLIT, 1, 1
        num_splits = -(-longest // FIXED_SPLIT)
        return FIXED_SPLIT, num_splits, min(num_splits, self._most // num_programs)

    # ---- a layer ----

    def __call__(self, plan: TritonPlan, layer: int, q: Tensor, out: Tensor) -> None:
        if q.stride(2) != 1 or out.stride(1) != out.shape[2] or out.stride(2) != 1:
            raise ValueError(
                "triton attention takes queries with contiguous heads, and an output with its heads in a row"
            )
        for launch in plan.launches:
            # A window is walked by one program each, however long the sequence is.
            is_dealt = launch.num_sharing > 0 and self.shape.windows[layer] is None
            self._attend(plan, launch, layer, q, out, is_dealt)
            if launch.num_splits > 1 or is_dealt:
                self._combine(plan, launch, out, layer, is_dealt)

    def _attend(self, plan: TritonPlan, launch: Launch, layer: int, q: Tensor, out: Tensor, is_dealt: bool) -> None:
        k, v, k_scales, v_scales = plan.layers[layer]
        window, sinks = self.shape.windows[layer], self._sinks_of(layer, out)
        shape, group, table = self.shape, plan.pool.group, plan.table
        num_sharing = launch.num_sharing if is_dealt else 0
        self._kernels.attend[(num_sharing + launch.num_tiles, shape.num_kv_heads, launch.num_programs)](
            q, out, _or(launch.partials, out), _or(launch.stats, out), k, v, k_scales, v_scales, sinks,
            _or(launch.tiles, table.kv_lens), table.query_starts, table.kv_lens, table.block_ids,
            _or(launch.items, table.kv_lens), _or(launch.owners, table.kv_lens),
            q.stride(0), q.stride(1), out.stride(0), table.block_ids.stride(0), *k.stride()[:3],
            *k_scales.stride()[:3], *self._scales, window or 0, group.block_size,
            launch.split_len, launch.num_splits, launch.tiles_per_seq, num_sharing, launch.tile_rows,
            GROUP=shape.group_size, HEAD_DIM=shape.head_dim, BLOCK_D=self._block_d, BLOCK_M=launch.tile,
            BLOCK_N=BLOCK_N, FORM=group.form if group.row_scale_bytes else "cast",
            WINDOWED=window is not None, CAPPED=shape.softcap is not None, SINKS=shape.sinks,
            PARTIAL=launch.num_splits > 1, SHARED=is_dealt, MIN_SPLIT=FAST_MIN_SPLIT,
            num_warps=num_warps(launch.tile, self._block_d, group.form), num_stages=self._num_stages,
            enable_fp_fusion=not self.batch_invariant,
        )  # fmt: skip

    def _combine(self, plan: TritonPlan, launch: Launch, out: Tensor, layer: int, is_dealt: bool) -> None:
        kv_lens, shape, window = plan.table.kv_lens, self.shape, self.shape.windows[layer]
        self._kernels.combine[(launch.num_tokens, shape.num_heads)](
            launch.partials, launch.stats, self._sinks_of(layer, out), _or(launch.tokens, kv_lens), kv_lens,
            _or(launch.items, kv_lens), out, out.stride(0), window or 0, launch.split_len, launch.num_splits,
            launch.query_len, launch.tiles_per_seq, launch.tile_rows, GROUP=shape.group_size, HEAD_DIM=shape.head_dim,
            BLOCK_D=self._block_d, BLOCK_M=launch.tile, BLOCK_N=BLOCK_N, WINDOWED=window is not None, SINKS=shape.sinks,
            SHARED=is_dealt, MIN_SPLIT=FAST_MIN_SPLIT, num_warps=1, enable_fp_fusion=not self.batch_invariant,
        )  # fmt: skip

    def _sinks_of(self, layer: int, fallback: Tensor) -> Tensor:
        """Return the sinks of a layer's heads; without sinks `fallback`, which the kernel does not read."""
        return self.sinks[layer] if self.shape.sinks else fallback


class FastTritonAttention(TritonAttention):
    """Attend in Triton with tiles and splits chosen by the load, on which a row's bits then depend."""

    name = "triton-fast"
    batch_invariant = False
    _dealt_split = FAST_DEALT_SPLIT

    def _tile(self, query_len: int, form: str) -> int:
        return FAST_FEW_TILE if query_len <= FEW_QUERIES else self._most_rows(form)

    def _splits(self, num_tiles: int, query_len: int, longest: int) -> tuple[int, int, int]:
        wanted = self._wanted // (num_tiles * self.shape.num_kv_heads) if query_len <= FEW_QUERIES else 1
        num_splits = max(1, min(wanted, -(-longest // FAST_MIN_SPLIT)))
        return 0, num_splits, num_splits


def shared_bytes(properties: Any) -> int:
    """Return the bytes of shared memory that a block may use: 166,912 on an A100, 232,448 on an H100 or B200, 101,376
    on compute capability 8.6, 8.9 and 12.0. `properties`: torch's, whose stub lacks the field."""
    return properties.shared_memory_per_block_optin


def num_warps(tile: int, block_d: int, form: str) -> int:
    """Return the number of warps of a program. Forms with scales, and e4m3 in tiles of few rows, are decoded in more
    registers than four warps have."""
    stored = KV_FORMS[form]
    decoded = stored.scale_bytes > 0 or (stored.bits == 8 and tile <= FAST_FEW_TILE)
    return 8 if decoded or tile * block_d > 64 * 128 or (block_d > 128 and tile > FAST_FEW_TILE) else 4


def layers_of(pool: KVPool) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return for each layer k, v [blocks, kv heads, tokens, elements] and their fp16 scales (k, v again without
    scales)."""
    scales = pool.scales.view(torch.float16) if pool.scales.shape[-1] else pool.blocks
    return [
        (pool.blocks[:, layer, 0], pool.blocks[:, layer, -1], scales[:, layer, 0], scales[:, layer, -1])
        for layer in range(pool.group.num_layers)
    ]


def _sent(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    return sent(torch.tensor(rows, dtype=torch.int32, device="cpu"), device)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor
