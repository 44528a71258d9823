"""Attention through torch's fused kernel (flash attention on CPU), called so that a row's bits depend on itself alone.

The kernel walks KV in blocks of 512 positions from the first one, and query rows in tiles of at most 32. Its matrix
products add in an order that depends on their shape, so the shape is fixed: prefill gives tiles of TILE rows, as a
batch of their own, never more (with 64 rows the kernel may repack KV in bf16 and add otherwise, with 16 in fp16).

Two things may be smaller where that is measured, at start, not to change a bit: the rows of a decode token, and the
last block of KV. On an AVX-512 machine with MKL rows may be any multiple of 4, and the last block any multiple of 64
except 256 and 320. Tiles of TILE rows over blocks of 512 positions are what the others are compared with.

Decode rows of all sequences go in one call. Queries that share a KV head are rows of the same product, so that KV is
read once for all of them.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton.engine.attention.base import Attention, AttentionShape, visible
from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.kv.pool import KVPool

TILE = {torch.float32: 32, torch.bfloat16: 32, torch.float16: 8}
KV_BLOCK = 512  # positions that the kernel reduces at a time
KV_STEP = 64
TILES_PER_CALL = 16  # for a prefill chunk; each call ends at the last position that its tiles see
WASTE_TOKENS = 1024  # padding of a decode group beyond which another call is cheaper


@dataclass(frozen=True, slots=True)
class Call:
    """Describe one call of the kernel: tiles [begin, end) of a group, over the first `kv_len` positions."""

    begin: int
    end: int
    kv_len: int
    masks: dict[int | None, Tensor]  # window -> additive, [tiles | 1, 1, rows | 1, kv_len]


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Hold decode tokens of several sequences, one tile each, or the chunk of one sequence, cut into tiles."""

    rows: slice | Tensor  # in the batch
    chunk_len: int  # query tokens of the one sequence; 0 for a decode group
    tile: int  # rows, padding included
    block_table: Tensor  # int64 [sequences, blocks]
    stale: Tensor | None  # rows of the gathered KV [sequences * blocks * block_size] that have to be zeroed
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """Hold the groups of a step and the pool."""

    pool: KVPool
    groups: tuple[TileGroup, ...]


class SdpaAttention(Attention):
    """Attend by torch's flash kernel; exact if torch has that kernel here."""

    name = "sdpa"

    def __init__(self, shape: AttentionShape):
        super().__init__(shape)
        self.tile = TILE[shape.dtype]
        self.batch_invariant = shape.device.type == "cpu" and has_flash(shape)
        self.decode_rows, self.tails = safe_shapes(shape) if self.batch_invariant else (self.tile, ())
        self._windows = set(shape.windows)
        self._visible = partial(visible, chunked=shape.chunked)
        self._scratch = torch.empty(0)
        self._before: dict[int, tuple[Tensor, int, KVPool, bool]] = {}  # by block table: tails in the last step
        self._now: dict[int, tuple[Tensor, int, KVPool, bool]] = {}  # the same in this step

    @classmethod
    def unfit(cls, shape: AttentionShape) -> str:
        if shape.sinks:
            return "torch's kernel has no sinks"
        return "" if shape.softcap is None else "torch's kernel has no soft cap"

    def plan(self, batch: ForwardBatch, pool: KVPool) -> SdpaPlan:
        self._before, self._now = self._now, {}
        one_tile = self.shape.group_size <= self.tile
        decode = [seq for seq in batch.seqs if seq.query_len == 1 and one_tile]
        groups = [self._decode_group(seqs, pool) for seqs in similar(decode)]
        groups += [self._chunk_group(seq, pool) for seq in batch.seqs if seq.query_len > 1 or not one_tile]
        return SdpaPlan(pool, tuple(groups))

    def __call__(self, plan: SdpaPlan, layer: int, q: Tensor, out: Tensor) -> None:
        window = self.shape.windows[layer]
        for group in plan.groups:
            tiles = self._tiles(q[group.rows], group)
            k, v = self._gather(plan.pool, layer, group, q.dtype)
            parts = []
            for call in group.calls:
                rows = tiles[call.begin : call.end]
                keys, values = (x[:, :, : call.kv_len].expand(len(rows), -1, -1, -1) for x in (k, v))
                mask, scale = call.masks[window], self.shape.given_scale
                parts.append(F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale))
            out[group.rows] = self._tokens(parts[0] if len(parts) == 1 else torch.cat(parts), group)

    # ---- the plan ----

    def _tail_is_finite(self, seq: SeqSlice, pool: KVPool) -> bool:
        """Return whether the unused rest of a sequence's last block is finite. The mask gives it no weight, but 0 times
        NaN is NaN. It is checked once per block, since one more token changes nothing."""
        known = self._before.get(id(seq.block_ids))
        same_block = (seq.kv_len - 1) % pool.block_size != 0
        if same_block and known is not None and known[1:3] == (seq.kv_len - 1, pool):
            finite = known[3]
        else:
            finite = pool.tail_is_finite(seq.block_ids, seq.kv_len)
        # The tensor is held, so that its id is not reused.
        self._now[id(seq.block_ids)] = (seq.block_ids, seq.kv_len, pool, finite)
        return finite

    def _stale(self, seqs: list[SeqSlice], pool: KVPool, num_positions: int) -> Tensor | None:
        """Return the rows of the gathered KV [sequences * positions] that have to be zeroed; None without any."""
        kv_lens = [num_positions if self._tail_is_finite(seq, pool) else seq.kv_len for seq in seqs]
        if min(kv_lens) == num_positions:
            return None
        device = self.shape.device
        stale = torch.arange(num_positions, device=device) >= torch.tensor(kv_lens, device=device).unsqueeze(1)
        return stale.view(-1).nonzero().view(-1)

    def _padded(self, kv_len: int) -> int:
        """Return the next length whose last KV block keeps a row's bits."""
        whole, tail = divmod(kv_len, KV_BLOCK)
        return whole * KV_BLOCK + next(safe for safe in (0, *self.tails, KV_BLOCK) if safe >= tail)

    def _decode_group(self, seqs: list[SeqSlice], pool: KVPool) -> TileGroup:
        """Group decode sequences, which come longest first."""
        kv_len = self._padded(seqs[0].kv_len)
        device = self.shape.device
        kv_lens = torch.tensor([seq.kv_len for seq in seqs], device=device)
        positions = torch.arange(kv_len, device=device)
        masks = {
            window: self._additive(self._visible(kv_lens - 1, positions, window)).view(len(seqs), 1, 1, kv_len)
            for window in self._windows
        }
        start = seqs[0].query_start
        starts = [seq.query_start for seq in seqs]
        rows = slice(start, start + 1) if len(seqs) == 1 else torch.tensor(starts, device=device)
        table = self._block_table(seqs, pool, kv_len)
        stale = self._stale(seqs, pool, table.shape[1] * pool.block_size)
        return TileGroup(rows, 0, self.decode_rows, table, stale, (Call(0, len(seqs), kv_len, masks),))

    def _chunk_group(self, seq: SeqSlice, pool: KVPool) -> TileGroup:
        size = self.shape.group_size
        positions = torch.arange(seq.kv_len - seq.query_len, seq.kv_len, device=self.shape.device).repeat_interleave(
            size
        )
        # Rows of padding get the last position; their results are thrown away.
        positions = F.pad(positions, (0, -len(positions) % self.tile), value=seq.kv_len - 1).view(-1, 1, self.tile)
        calls = []
        for begin in range(0, len(positions), TILES_PER_CALL):
            tiles = positions[begin : begin + TILES_PER_CALL]
            kv_len = self._padded(int(tiles[-1, 0, -1]) + 1)
            keys = torch.arange(kv_len, device=self.shape.device)
            masks = {
                window: self._additive(self._visible(tiles.reshape(-1), keys, window)).view(-1, 1, self.tile, kv_len)
                for window in self._windows
            }
            calls.append(Call(begin, begin + len(tiles), kv_len, masks))
        rows = slice(seq.query_start, seq.query_start + seq.query_len)
        table = self._block_table([seq], pool, calls[-1].kv_len)
        stale = self._stale([seq], pool, table.shape[1] * pool.block_size)
        return TileGroup(rows, seq.query_len, self.tile, table, stale, tuple(calls))

    def _block_table(self, seqs: list[SeqSlice], pool: KVPool, kv_len: int) -> Tensor:
        """Return the blocks for `kv_len` positions; beyond a sequence's end its first block, which is finite and
        masked."""
        table = torch.empty(len(seqs), -(-kv_len // pool.block_size), dtype=torch.int64, device=self.shape.device)
        for row, seq in zip(table, seqs, strict=True):
            used = -(-seq.kv_len // pool.block_size)
            row[:used] = seq.block_ids[:used]
            row[used:] = seq.block_ids[0]
        return table

    def _additive(self, seen: Tensor) -> Tensor:
        return torch.zeros(seen.shape, dtype=self.shape.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))

    # ---- a layer ----

    def _gather(self, pool: KVPool, layer: int, group: TileGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return K and V [sequences, kv_heads, positions, head_dim] in memory that is reused, since fresh pages cost
        more."""
        heads, num_rows = 2 * self.shape.num_kv_heads, group.block_table.numel() * pool.block_size
        needed = heads * num_rows * self.shape.head_dim
        if self._scratch.numel() < needed or self._scratch.dtype != pool.dtype:
            self._scratch = torch.empty(needed, dtype=pool.dtype, device=pool.device)
        return pool.gather_padded(layer, group.block_table, dtype, group.stale, self._scratch)

    def _tiles(self, q: Tensor, group: TileGroup) -> Tensor:
        """Arrange q [tokens, num_heads, head_dim] in tiles [tiles, kv_heads, tile, head_dim]."""
        shape = self.shape
        rows = q.unflatten(1, (shape.num_kv_heads, shape.group_size))
        if group.chunk_len:  # rows of one sequence follow each other, whatever token they belong to
            rows = rows.transpose(0, 1).reshape(shape.num_kv_heads, -1, shape.head_dim)
            rows = F.pad(rows, (0, 0, 0, -rows.shape[1] % group.tile))
            return rows.unflatten(1, (-1, group.tile)).transpose(0, 1)
        missing = group.tile - shape.group_size
        return F.pad(rows, (0, 0, 0, missing)) if missing else rows

    def _tokens(self, tiles: Tensor, group: TileGroup) -> Tensor:
        """Undo `_tiles`, and drop the padding."""
        shape = self.shape
        if group.chunk_len:
            rows = tiles.transpose(0, 1).reshape(shape.num_kv_heads, -1, shape.head_dim)
            rows = rows[:, : group.chunk_len * shape.group_size].unflatten(1, (group.chunk_len, shape.group_size))
            return rows.transpose(0, 1).flatten(1, 2)
        return tiles[:, :, : shape.group_size].flatten(1, 2)


def similar(seqs: list[SeqSlice]) -> list[list[SeqSlice]]:
    """Divide decode sequences, longest first, where padding to the longest would cost more than another call."""
    groups: list[list[SeqSlice]] = []
    waste = 0
    for seq in sorted(seqs, key=lambda seq: seq.kv_len, reverse=True):
        if groups:
            waste += groups[-1][0].kv_len - seq.kv_len
        if not groups or waste > WASTE_TOKENS:
            groups.append([])
            waste = 0
        groups[-1].append(seq)
    return groups


def has_flash(shape: AttentionShape) -> bool:
    """Return whether torch uses its flash kernel for this shape; its other kernels guarantee nothing."""
    operands = probe(shape, TILE[shape.dtype])
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            flash = F.scaled_dot_product_attention(*operands)
    except RuntimeError:
        return False
    return torch.equal(flash, F.scaled_dot_product_attention(*operands))


def safe_shapes(shape: AttentionShape) -> tuple[int, tuple[int, ...]]:
    """Return the number of rows to pad a decode token's queries to, and the lengths of a last KV block, that keep a
    row's bits."""
    tile = TILE[shape.dtype]
    q, k, v, mask = probe(shape, tile)

    def same(count: int, length: int) -> bool:
        """Return whether rows that see at most `length` positions are equal in a product of that shape."""
        visible_rows = tile * length // KV_BLOCK
        rows = torch.arange(count) % visible_rows
        out = F.scaled_dot_product_attention(q[:, :, rows], k[:, :, :length], v[:, :, :length], mask[rows, :length])
        return torch.equal(out, truth[:, :, rows])

    truth = F.scaled_dot_product_attention(q, k, v, mask)
    if shape.group_size > tile:
        return tile, tuple(tail for tail in range(KV_STEP, KV_BLOCK, KV_STEP) if same(tile, tail))
    counts = sorted({-(-shape.group_size // step) * step for step in (4, 8, tile)})
    decode_rows = next((count for count in counts if same(count, KV_BLOCK)), tile)
    tails = range(KV_STEP, KV_BLOCK, KV_STEP)
    return decode_rows, tuple(tail for tail in tails if same(tile, tail) and same(decode_rows, tail))


def probe(shape: AttentionShape, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q [1, 2, num_rows, head_dim], k and v [1, 2, KV_BLOCK, head_dim] and mask [num_rows, KV_BLOCK] whose sums
    cancel, so that another order of adding shows even after rounding to bf16.

    Row i sees the first (i + 1) / num_rows of 512 positions. Four consecutive positions share their key and so their
    weight; their values are large, small, minus large, small: the sum before them is rounded at the size of the large
    one.
    """
    generator = torch.Generator().manual_seed(0)
    exponents = (12, 16) if shape.dtype == torch.float16 else (18, 22)

    def cancelling(size: int, width: int) -> Tensor:
        """Return values [size, width] that cancel along the first dimension."""
        values = torch.randn(size, width, generator=generator)
        large = torch.exp2(torch.randint(*exponents, (size // 4, width), generator=generator).float())
        values[0 : size // 4 * 4 : 4], values[2 : size // 4 * 4 : 4] = large, -large
        return values

    head_dim = shape.head_dim
    keys = torch.stack([cancelling(head_dim, KV_BLOCK // 4).t().repeat_interleave(4, dim=0) for _ in range(2)])
    values = torch.stack([cancelling(KV_BLOCK, head_dim) for _ in range(2)])
    last_seen = torch.arange(1, num_rows + 1) * KV_BLOCK // num_rows
    mask = torch.zeros(num_rows, KV_BLOCK).masked_fill_(torch.arange(KV_BLOCK) >= last_seen.unsqueeze(1), float("-inf"))
    operands = (torch.ones(1, 2, num_rows, head_dim), keys.unsqueeze(0), values.unsqueeze(0), mask)
    return tuple(operand.to(shape.dtype) for operand in operands)
