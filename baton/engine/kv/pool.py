"""The pool: all KV of a worker as one piece of byte memory, [block][layer][k|v][kv_head][token][head_dim].

The memory may be a mapping that other processes see (a memfd); layers are strided views of it, never copies.
"""

import math

import torch
from torch import Tensor

from kvtransfer.layout import KVLayout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class KVPool:
    """Paged KV of one model. Blocks are numbered [0, num_blocks); what is in them is the ledger's business."""

    def __init__(self, layout: KVLayout, num_blocks: int, memory: memoryview | None = None):
        """`memory`: writable, at least num_blocks * layout.block_bytes; None allocates zeroed memory of its own."""
        (group,) = layout.groups
        if group.form not in DTYPES:
            raise ValueError(f"KV form {group.form!r} is not supported by this pool: one of {', '.join(DTYPES)}")
        num_bytes = num_blocks * layout.block_bytes
        if memory is not None and memory.nbytes < num_bytes:
            raise ValueError(f"KV pool of {num_blocks} blocks needs {num_bytes} bytes, its memory has {memory.nbytes}")
        self.layout, self.group, self.num_blocks = layout, group, num_blocks
        if memory is None:
            self.bytes = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
        else:
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).view(num_blocks, -1)
        shape = (num_blocks, group.num_layers, 2, group.num_kv_heads, group.block_size, group.head_dim)
        self.blocks = self.bytes.view(DTYPES[group.form]).view(shape)
        # Cells (one layer's K or V of one head in one block) as rows: whole sequences are gathered by one index_select.
        self._cells = self.blocks.view(-1, group.block_size * group.head_dim)
        heads = torch.arange(2 * group.num_kv_heads).view(-1, 1)
        self._cell_of_head = [heads + 2 * group.num_kv_heads * layer for layer in range(group.num_layers)]
        self._tokens = self.blocks.view(-1, group.head_dim)
        self._rows_per_layer = 2 * group.num_kv_heads * group.block_size
        self._slots = self._rows = torch.empty(0)

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks.dtype

    @property
    def block_size(self) -> int:
        return self.group.block_size

    def k(self, layer: int) -> Tensor:
        """Keys of a layer, a view [num_blocks, kv_heads, block_size, head_dim]."""
        return self.blocks[:, layer, 0]

    def v(self, layer: int) -> Tensor:
        """Values of a layer, a view [num_blocks, kv_heads, block_size, head_dim]."""
        return self.blocks[:, layer, 1]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] at `slots` [T] (block_id * block_size + offset)."""
        if slots is not self._slots:  # the same for all layers of a step
            self._slots, self._rows = slots, self._token_rows(slots)
        rows = (self._rows + self._rows_per_layer * layer).view(-1)
        self._tokens.index_copy_(0, rows, torch.stack((k, v), dim=1).to(self.dtype).view(-1, self.group.head_dim))

    def _token_rows(self, slots: Tensor) -> Tensor:
        """Rows of layer 0 that the tokens at `slots` own, [T, 2 * kv_heads]."""
        size = self.block_size
        first = (slots // size) * (self._rows_per_layer * self.group.num_layers) + slots % size
        return first.unsqueeze(1) + torch.arange(2 * self.group.num_kv_heads) * size

    def gather(self, layer: int, block_ids: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Copies of the first `num_tokens` tokens of a sequence: k, v [kv_heads, num_tokens, head_dim]."""
        blocks = block_ids[: self.layout.num_blocks(num_tokens)]
        k, v = self.gather_padded(layer, blocks.unsqueeze(0))
        return k[0, :, :num_tokens], v[0, :, :num_tokens]

    def gather_padded(self, layer: int, block_table: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Copies of whole blocks of B sequences: k, v [B, kv_heads, N * block_size, head_dim].

        `block_table`: int64 [B, N]. `out`: a flat buffer of the pool's dtype to copy into, large enough.
        """
        group = self.group
        batch, num_blocks = block_table.shape
        cells_per_block = 2 * group.num_kv_heads * group.num_layers
        index = (block_table.reshape(1, -1) * cells_per_block + self._cell_of_head[layer]).view(-1)
        if out is not None:
            out = out[: index.numel() * self._cells.shape[1]].view(index.numel(), -1)
        cells = torch.index_select(self._cells, 0, index, out=out)
        cells = cells.view(2, group.num_kv_heads, batch, num_blocks * group.block_size, group.head_dim)
        return cells[0].transpose(0, 1), cells[1].transpose(0, 1)

    def tail_is_finite(self, block_ids: Tensor, num_tokens: int) -> bool:
        """Whether what lies behind the last token of a sequence in its last block is free of infinities and NaN."""
        offset = num_tokens % self.block_size
        if offset == 0:
            return True
        tail = self.blocks[block_ids[num_tokens // self.block_size], :, :, :, offset:]
        return math.isfinite(tail.abs().amax())

    def copy_block(self, src: int, dst: int) -> None:
        """Copy all layers of one block: a tail that becomes somebody's own."""
        self.bytes[dst].copy_(self.bytes[src])
