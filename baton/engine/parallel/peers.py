"""Sum among ranks whose GPUs reach each other's memory, without a library's collectives. A rank writes its part to
memory that all can read; after a barrier one kernel on each GPU adds 1/N of the elements, by the tree of ranks, and
writes the sums to all of them; after a second barrier they are complete."""

from typing import Protocol

import torch
from torch import Tensor, distributed

from baton.engine.parallel.shard import Shard

_GROUP = "baton-ranks"


class PeerMemory(Protocol):
    """Provide memory of this rank that the others' kernels read and write."""

    own: Tensor  # uint8
    addresses: list[int]  # of every rank's memory, as this rank's kernels reach it

    def barrier(self, channel: int) -> None:
        """Make later launches wait until all ranks have come to this barrier."""
        ...


class SymmetricMemory:
    """Provide torch's symmetric memory, whose interface is private: raises RuntimeError or AttributeError if it has
    changed."""

    def __init__(self, store: distributed.Store, shard: Shard, device: torch.device, num_bytes: int):
        from torch._C._distributed_c10d import _SymmetricMemory

        _SymmetricMemory.set_group_info(_GROUP, shard.rank, shard.degree, distributed.PrefixStore("peers", store))
        self.own = _SymmetricMemory.empty_strided_p2p((num_bytes,), [1], torch.uint8, device, _GROUP)
        self._handle = _SymmetricMemory.rendezvous(self.own)
        self.addresses = list(self._handle.buffer_ptrs)

    def barrier(self, channel: int) -> None:
        self._handle.barrier(channel)


class PeerSums:
    """Sum at one rank; all ranks call `sum` together, in one stream."""

    def __init__(self, memory: PeerMemory, shard: Shard, num_elements: int):
        """Use `memory` of num_bytes(num_elements), the most elements of a sum."""
        from baton.engine.parallel.add_ranks import add_peers  # triton is an optional dependency

        self._add, self._memory, self._shard, self.num_elements = add_peers, memory, shard, num_elements
        self._parts = memory.own[: 4 * num_elements].view(torch.float32)
        self._sums = memory.own[4 * num_elements :]
        addresses = torch.tensor(memory.addresses, dtype=torch.int64, device="cpu")
        self._tables = torch.stack((addresses, addresses + 4 * num_elements)).to(memory.own.device)

    def sum(self, part: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """Add the parts of all ranks as Collectives does, exactly."""
        count, rank, degree = part.numel(), self._shard.rank, self._shard.degree
        self._parts[:count].copy_(part.flatten())
        self._memory.barrier(0)
        self._add(*self._tables, dtype, bias, rank * count // degree, count // degree)
        self._memory.barrier(1)
        # A copy: the next sum is written to the same place while rows of this one are still in use.
        return self._sums[: count * dtype.itemsize].view(dtype).view(part.shape).clone()


def num_bytes(num_elements: int) -> int:
    """Return the bytes for sums of at most so many elements: parts and sums in fp32."""
    return 8 * num_elements
