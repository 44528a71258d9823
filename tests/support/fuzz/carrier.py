"""Copy KV without a transport: tokens from the pool of one engine to that of another, bit for bit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.engine import Engine
from baton.engine.kv.pool import KVPool
from kvtransfer.layout import BlockRef


class Lease:
    """Blocks that `source` has promised to `taker` under a name, and their refs at that time."""

    def __init__(self, source: Engine, taker: Engine, refs: Sequence[BlockRef]):
        self.source, self.taker, self.refs = source, taker, refs

    def carry(self, refs: Sequence[BlockRef], begin: int, end: int) -> bool:
        """Copy tokens [begin, end) into blocks `refs` of the taker, whatever the block sizes. False: what was leased is
        something else by now, and so is what was carried."""
        tokens = torch.arange(begin, end)
        theirs, ours = _places(self.source.pool, self.refs, tokens), _places(self.taker.pool, refs, tokens)
        for source, taker in zip(_rows(self.source.pool), _rows(self.taker.pool), strict=True):
            taker[ours[0], :, :, :, ours[1]] = source[theirs[0], :, :, :, theirs[1]]
        size = self.source.layout.block_size
        used = self.refs[begin // size : (end - 1) // size + 1]
        return all(self.source.ledger.generation(ref.block_id) == ref.generation for ref in used)


def _places(pool: KVPool, refs: Sequence[BlockRef], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of tokens: (blocks, offsets)."""
    block_ids = torch.tensor([ref.block_id for ref in refs])
    return block_ids[tokens // pool.block_size], tokens % pool.block_size


def _rows(pool: KVPool) -> tuple[Tensor, Tensor]:
    """As they are stored, [block, layer, k|v, head, token, byte], and their scales."""
    return pool.blocks.view(torch.uint8), pool.scales
