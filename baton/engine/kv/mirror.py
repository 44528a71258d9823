"""A host copy of a GPU pool's blocks, for transports that read and write host memory: same block numbers, same bytes.

Only what crosses to or from another worker is copied: out before it is announced, in before it is attended to. Both
calls return when the bytes are there; they run beside the engine's steps, on a stream of their own.
"""

from collections.abc import Sequence

import torch

from baton.engine.kv.pool import KVPool

BLOCKS_AT_ONCE = 256  # of one copy: what it takes of the GPU's memory meanwhile


class HostMirror:
    """Thread-safe for disjoint blocks."""

    def __init__(self, pool: KVPool, memory: memoryview):
        """`memory`: writable, as large as the pool."""
        self._pool = pool
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=pool.bytes.numel())
        self._host = whole.view(pool.num_blocks, -1)
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None

    def copy_out(self, block_ids: Sequence[int]) -> None:
        """Blocks whose last write has passed: device -> host."""
        self._copy(block_ids, lambda ids: self._host.index_copy_(0, ids, self._pool.bytes[self._there(ids)].cpu()))

    def copy_in(self, block_ids: Sequence[int]) -> None:
        """Blocks that no step reads yet: host -> device."""
        self._copy(
            block_ids, lambda ids: self._pool.bytes.index_copy_(0, self._there(ids), self._there(self._host[ids]))
        )

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._pool.device)

    @torch.inference_mode()
    def _copy(self, block_ids: Sequence[int], copy) -> None:
        for begin in range(0, len(block_ids), BLOCKS_AT_ONCE):
            ids = torch.tensor(block_ids[begin : begin + BLOCKS_AT_ONCE], dtype=torch.int64, device="cpu")
            with torch.cuda.stream(self._stream):
                copy(ids)
        if self._stream is not None:
            self._stream.synchronize()
