"""Hold all KV of a worker in one piece of memory: [block][layer][k|v][kv_head][token][head_dim].

Each block ends with the scales of a quantized form, [layer][k|v][kv_head][token].

The memory may be a mapping that other processes see (a memfd); layers are strided views of it, never copies. A row (one
token of one head of K or of V) is encoded when it is written and decoded when it is read; blocks are copied as bytes.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor

from baton.engine.kv.states import StatePool
from baton.engine.kv.stored_forms import STORED, decode, encode, num_elements
from baton.system import PAGE
from kvtransfer.layout import KV_FORMS, KVLayout

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class KVPool:
    """The paged KV of one model, in blocks [0, num_blocks). The ledger knows who holds which.

    `blocks`: the rows as they are stored, [num_blocks, layers, k|v, kv_heads, block_size, elements of a row];
    `scales`: their scales as bytes, [num_blocks, layers, k|v, kv_heads, block_size, scale bytes of a row]. In a latent
    group one row serves as K and V.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, memory: memoryview | Any = None, device: torch.device = CPU,
        num_states: int = 0,
    ):  # fmt: skip
        """Take writable memory of at least layout.pool_bytes(num_blocks, num_states), or allocate zeroed memory if
        None.

        On a GPU `memory` is any object with the CUDA array interface.
        """
        group = layout.groups[0]
        if group.head_dim * KV_FORMS[group.form].bits % 8:
            raise ValueError(f"KV form {group.form} packs two elements into a byte: head_dim {group.head_dim} is odd")
        num_bytes = layout.pool_bytes(num_blocks, num_states)
        self.layout, self.group, self.num_blocks, self.device = layout, group, num_blocks, device
        self.num_layers = layout.num_layers  # with KV, in this pool and in other pools of the same blocks
        self._memory = memory  # keeps it alive: on a GPU a tensor over it does not
        if memory is None:
            room = PAGE if device == CPU else 0  # to begin on a page, as mappings do
            whole = torch.zeros(num_bytes + room, dtype=torch.uint8, device=device)
            whole = whole[-whole.data_ptr() % room if room else 0 :][:num_bytes]
        else:
            on_cpu = device == CPU
            whole = torch.frombuffer(memory, dtype=torch.uint8) if on_cpu else torch.as_tensor(memory, device=device)
            if whole.numel() < num_bytes:
                sizes = f"needs {num_bytes} bytes, its memory has {whole.numel()}"
                raise ValueError(f"KV pool of {num_blocks} blocks {sizes}")
        self.whole = whole[:num_bytes]  # blocks, then states
        self.bytes = whole[: num_blocks * layout.block_bytes].view(num_blocks, layout.block_bytes)
        self.states: StatePool | None = None
        if layout.state is not None:
            self.states = StatePool(layout.state, whole[num_bytes - num_states * layout.state_bytes : num_bytes])
        kinds = group.num_kinds
        rows = (num_blocks, group.num_layers, kinds, group.num_kv_heads, group.block_size)
        stored = torch.empty(num_blocks, 0, dtype=STORED[group.form])  # no layer has KV: blocks are only ids
        if group.num_layers:
            stored = self.bytes[:, : group.head_bytes].view(STORED[group.form])
        self.heads = range(group.num_kv_heads)  # that this object writes and reads
        self.blocks = stored.view(*rows, num_elements(group.form, group.head_dim))
        self.scales = self.bytes[:, group.head_bytes :].view(*rows, group.row_scale_bytes)
        # If the stored dtype is one that attention computes in, a whole sequence is gathered cell by cell (one layer's
        # K or V of one head in one block) by one index_select, and tokens are written by one index_copy_.
        self._is_plain = group.form in DTYPES
        if self._is_plain:
            self._cells = self.blocks.view(-1, group.block_size * group.head_dim)
            self._tokens = self.blocks.view(-1, group.head_dim)
        heads = torch.arange(kinds * group.num_kv_heads, device=device).view(-1, 1)
        self._cell_of_head = [heads + kinds * group.num_kv_heads * layer for layer in range(group.num_layers)]
        self._rows_per_layer = kinds * group.num_kv_heads * group.block_size
        self._slots = self._rows = torch.empty(0)

    def part(self, heads: range) -> "KVPool":
        """Return a pool over the same memory of which `write` and native kernels use only these heads."""
        pool = copy.copy(self)
        pool.heads = heads
        pool._slots = pool._rows = torch.empty(0)
        return pool

    def layers_of_block(self, block_id: int, layers: range) -> Tensor:
        """Return the bytes of some layers of a block: all rows, then all scales."""
        own = slice(layers.start, layers.stop)
        rows, scales = self.blocks[block_id, own], self.scales[block_id, own]
        return torch.cat((rows.contiguous().view(torch.uint8).flatten(), scales.flatten()))

    @property
    def layer_bytes(self) -> int:
        """The bytes of one layer in `layers_of_block`."""
        return self.group.block_bytes // self.group.num_layers

    def put_layers_of_block(self, block_id: int, first_layer: int, data: Tensor) -> None:
        """Write what `layers_of_block` of another pool returned, as the layers from `first_layer` on."""
        own = slice(first_layer, first_layer + len(data) // self.layer_bytes)
        rows, scales = self.blocks[block_id, own].view(torch.uint8), self.scales[block_id, own]
        rows.copy_(data[: rows.numel()].view(rows.shape))
        scales.copy_(data[rows.numel() :].view(scales.shape))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which rows are decoded without loss."""
        return self.blocks.dtype if self._is_plain else torch.float32

    @property
    def block_size(self) -> int:
        return self.group.block_size

    def write(self, layer: int, slots: Tensor, *kinds: Tensor) -> None:
        """Store k and v, or the row of a latent group, at `slots`.

        `kinds`: each [T, heads of this object, head_dim]. `slots`: [T], block_id * block_size + offset.
        """
        stacked = torch.stack(kinds, dim=1)
        if not self._is_plain:
            self._encode(layer, slots, stacked)
            return
        if slots is not self._slots:  # the same for all layers of a step
            self._slots, self._rows = slots, self._token_rows(slots)
        rows = (self._rows + self._rows_per_layer * layer).view(-1)
        self._tokens.index_copy_(0, rows, stacked.to(self.dtype).view(-1, self.group.head_dim))

    def _encode(self, layer: int, slots: Tensor, stacked: Tensor) -> None:
        rows, scales = encode(self.group.form, stacked)
        block_ids, offsets = slots // self.block_size, slots % self.block_size
        own = slice(self.heads.start, self.heads.stop)
        self.blocks.view(torch.uint8)[:, layer, :, own][block_ids, :, :, offsets] = rows
        self.scales[:, layer, :, own][block_ids, :, :, offsets] = scales

    def _token_rows(self, slots: Tensor) -> Tensor:
        """Return the rows of layer 0 that belong to the tokens at `slots`, [T, k|v * heads]."""
        size = self.block_size
        first = (slots // size) * (self._rows_per_layer * self.group.num_layers) + slots % size
        heads = torch.arange(self.group.num_kinds * self.group.num_kv_heads, device=self.device)
        own = heads.view(self.group.num_kinds, -1)[:, self.heads.start : self.heads.stop].flatten()
        return first.unsqueeze(1) + own * size

    def gather(self, layer: int, block_ids: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return k and v [kv_heads, num_tokens, head_dim] of a sequence's first `num_tokens` tokens, decoded without
        loss."""
        blocks = block_ids[: self.layout.num_blocks(num_tokens)]
        k, v = self.gather_padded(layer, blocks.unsqueeze(0), self.dtype)
        return k[0, :, :num_tokens], v[0, :, :num_tokens]

    def gather_padded(
        self,
        layer: int,
        block_table: Tensor,
        dtype: torch.dtype,
        stale: Tensor | None = None,
        scratch: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return k and v [B, kv_heads, N * block_size, head_dim] of the whole blocks of B sequences, decoded to
        `dtype`.

        `block_table`: int64 [B, N]. `stale`: indices of the B * N * block_size tokens that are zeroed.
        `scratch`: a flat buffer of the pool's dtype to copy into, large enough; forms that are decoded need none.
        """
        group = self.group
        batch, num_blocks = block_table.shape
        if self._is_plain:
            cells = self._gather_cells(layer, block_table, scratch)
        else:
            cells = self._gather_decoded(layer, block_table, dtype)
        cells = cells.view(group.num_kinds * group.num_kv_heads, batch * num_blocks * group.block_size, group.head_dim)
        if stale is not None:
            cells.index_fill_(1, stale, 0)
        cells = cells.view(group.num_kinds, group.num_kv_heads, batch, num_blocks * group.block_size, group.head_dim)
        cells = cells.to(dtype)
        return cells[0].transpose(0, 1), cells[-1].transpose(0, 1)

    def _gather_cells(self, layer: int, block_table: Tensor, out: Tensor | None) -> Tensor:
        group = self.group
        cells_per_block = group.num_kinds * group.num_kv_heads * group.num_layers
        index = (block_table.reshape(1, -1) * cells_per_block + self._cell_of_head[layer]).view(-1)
        if out is not None:
            out = out[: index.numel() * self._cells.shape[1]].view(index.numel(), -1)
        return torch.index_select(self._cells, 0, index, out=out)

    def _gather_decoded(self, layer: int, block_table: Tensor, dtype: torch.dtype) -> Tensor:
        index = block_table.view(-1)
        rows, scales = self.blocks.view(torch.uint8)[:, layer][index], self.scales[:, layer][index]
        # [B * N, k|v, kv_heads, block_size, ...] -> heads outside
        return decode(self.group.form, rows.movedim(0, 2).contiguous(), scales.movedim(0, 2), dtype)

    def tail_is_finite(self, block_ids: Tensor, num_tokens: int) -> bool:
        """Return whether the unused end of a sequence's last block has no infinity and no NaN. `block_ids`: int64
        [blocks]."""
        offset = num_tokens % self.block_size
        if offset == 0:
            return True
        where = block_ids[num_tokens // self.block_size], slice(None), slice(None), slice(None), slice(offset, None)
        values = self.scales[where].view(torch.float16) if self.scales.shape[-1] else self.blocks[where].float()
        return math.isfinite(values.abs().amax())

    def copy_block(self, src: int, dst: int) -> None:
        """Copy all layers of one block: the tail of a prompt, for another choice."""
        self.bytes[dst].copy_(self.bytes[src])
