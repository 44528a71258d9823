"""Sum and gather among ranks over torch.distributed: NCCL between GPUs, gloo between CPUs. The first rank's commands go
through memory of the host, as among CPU ranks.

exact   parts travel in fp32, each element to the rank that adds it by the tree of ranks; rounded sums travel back. If
        the GPUs reach each other's memory, one kernel does it (peers.py); the start decides, and the bits are the same
fast    one all-reduce of rounded parts, in an order that the library chooses, also by the size of the step
"""

from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor, distributed

from baton.engine import kernels
from baton.engine.parallel.collectives import Collectives, RankLost
from baton.engine.parallel.peers import PeerMemory, PeerSums, SymmetricMemory, num_bytes
from baton.engine.parallel.shard import Shard
from baton.lines import one_line

JOIN_S = 60.0  # for ranks to meet, once all have their parts of the model; with gloo also for one call
# For one call with NCCL: another rank may be compiling, and one that stands still is noticed otherwise
# (ranks/spawn.py).
CALL_S = 600.0

MakePeerMemory = Callable[[distributed.Store, Shard, torch.device, int], PeerMemory]


class DistributedCollectives(Collectives):
    """Join one rank to the others, for tensors on `device`. Call `join` once, before the first sum or gather."""

    shares_memory = False

    def __init__(
        self, memory: memoryview, shard: Shard, store: distributed.Store, device: torch.device, fast: bool = False
    ):
        """Use `memory` and `fast` as Collectives does; `store`: through which the ranks find each other."""
        super().__init__(memory, shard, fast)
        self._store, self._device, self._group = store, device, None
        self.peers: PeerSums | None = None
        self.why_no_peers = ""
        self._add = add_tree
        if not kernels.unavailable(device.type):
            from baton.engine.parallel.add_ranks import add_ranks  # triton is an optional dependency

            self._add = add_ranks

    def join(self) -> None:
        """Meet the other ranks and make the process group, which may not be made while a graph is captured."""
        self._group = self._meet_others()
        self.sum(torch.zeros(1, 16, device=self._device), torch.float32)
        _wait(self._device)

    def reach(self, num_elements: int, make: MakePeerMemory | None = None) -> None:
        """Add through the other GPUs' memory from now on, sums of at most `num_elements`, if every rank can and both
        ways give equal bits; else `why_no_peers` says why not. All ranks call it together. `make`: replaces torch's
        symmetric memory."""
        why = "" if make is not None else self._out_of_reach()
        if self.least(int(not why)):
            try:
                memory = (make or SymmetricMemory)(self._store, self.shard, self._device, num_bytes(num_elements))
                self.peers = PeerSums(memory, self.shard, num_elements)
            except (RuntimeError, AttributeError, TypeError, ImportError) as error:
                why = one_line(error, 160)
            if self.least(int(not why)) and not self._peers_agree():
                why = "sums by way of it have other bits"
        if not self.least(int(not why)):
            self.peers, self.why_no_peers = None, why or "another rank cannot"

    @property
    def summary(self) -> str:
        """Return how ranks add, for the engine's start line."""
        return "sums in peers' memory" if self.peers is not None else f"sums by NCCL ({self.why_no_peers})"

    def _meet_others(self):
        """Return the process group of all ranks, once each is here. Raises RankLost."""
        self.least(0)  # without a limit, in memory of the host: some read their part for longer than JOIN_S
        return _meet(self._store, self.shard.rank, self.degree, self._device)

    def _out_of_reach(self) -> str:
        if self.fast or self._device.type == "cpu":
            return "only exact sums of GPUs go that way"
        if kernels.unavailable(self._device.type):
            return kernels.unavailable(self._device.type)
        others = (rank for rank in range(self.degree) if rank != self.shard.rank)
        away = [rank for rank in others if not torch.cuda.can_device_access_peer(self._device, rank)]
        return f"the memory of GPU {away[0]} cannot be reached" if away else ""

    def _peers_agree(self) -> bool:
        peers = self.peers
        assert peers is not None
        generator = torch.Generator().manual_seed(self.shard.rank)
        part = torch.randn(peers.num_elements, generator=generator).view(-1, 16).to(self._device)
        found = peers.sum(part, torch.bfloat16, None)
        self.peers = None
        wanted = self.sum(part, torch.bfloat16)
        self.peers = peers
        return torch.equal(found, wanted)

    def sum(self, part: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        if self.fast:
            assert bias is None  # the first rank's part includes it
            out = part.to(dtype, copy=True).contiguous()
            self._all(lambda group: group.allreduce([out]))
            return out
        if self.peers is not None and part.numel() <= self.peers.num_elements:
            return self.peers.sum(part, dtype, bias)
        parts = part.contiguous().view(self.degree, -1)  # each rank adds elements of whole rows, whatever their number
        theirs = torch.empty_like(parts)
        self._all(lambda group: group.alltoall_base(theirs, parts, [], []))
        own = self._add(theirs, dtype, bias, self.shard.rank * parts.shape[1])
        return self._gathered(own).view(part.shape)

    def gather(self, own: Tensor, wanted: bool = True) -> Tensor:
        """Return the values of all ranks on every rank, wanted or not."""
        own = own.contiguous()
        return self._gathered(own.flatten()).view(self.degree, *own.shape)

    def send(self, data: Tensor) -> None:
        """Copy the first rank's `data`, contiguous and on the device, to that of all others."""
        self._all(lambda group: group.broadcast([data]))

    def least(self, number: int) -> int:
        """Return the smallest number that any rank passes, exchanged through memory of the host."""
        numbers = super().gather(torch.tensor([number]))
        assert numbers is not None
        return int(numbers.min())

    def lose(self) -> None:
        super().lose()
        if self._group is not None:
            self._group.abort()  # NCCL's kernels end; with gloo a wait ends when the other process does

    def _gathered(self, own: Tensor) -> Tensor:
        out = own.new_empty(self.degree * len(own))
        self._all(lambda group: group._allgather_base(out, own))
        return out

    def _all(self, call: Callable) -> None:
        """Make one call on all ranks; on a GPU it is launched, not waited for. Raises RankLost."""
        _call(self._group, call)


class StageCollectives(DistributedCollectives):
    """Join one stage, on its own device, to the others; `shard` says which of how many it is. Stages share no layers,
    so there are no sums; rows go from each stage to the next, and from the last to the first."""

    def join(self) -> None:
        self._group = self._meet_others()
        # In the same order on all stages. Each direction has its own group: with one for both, a stage could wait for a
        # stage that waits for it.
        links = {}
        for link in range(self.degree):
            ends = link, (link + 1) % self.degree
            if self.shard.rank in ends:
                store = distributed.PrefixStore(f"stage {link}", self._store)
                links[link] = _meet(store, ends.index(self.shard.rank), 2, self._device)
        self._onward, self._inward = links[self.shard.rank], links[(self.shard.rank - 1) % self.degree]
        for group in [links[link] for link in sorted(links)] + [self._group]:
            _call(group, lambda group: group.broadcast([torch.zeros(1, device=self._device)]))
        _wait(self._device)

    @property
    def summary(self) -> str:
        return f"rows pass through {self.degree} stages"

    def pass_on(self, rows: Tensor) -> None:
        """Send rows, contiguous, to the next stage."""
        _call(self._onward, lambda group: group.broadcast([rows]))

    def take_in(self, rows: Tensor) -> None:
        """Fill rows, contiguous, with those of the stage before."""
        _call(self._inward, lambda group: group.broadcast([rows]))

    def lose(self) -> None:
        super().lose()
        for group in (self._onward, self._inward):
            if group is not None:
                group.abort()

    _onward = _inward = None  # until they have met


def _meet(store: distributed.Store, rank: int, degree: int, device: torch.device):
    """Return the process group of so many ranks. Raises RankLost."""
    make, call_s = (
        (distributed.ProcessGroupGloo, JOIN_S) if device.type == "cpu" else (distributed.ProcessGroupNCCL, CALL_S)
    )
    store.set_timeout(timedelta(seconds=JOIN_S))
    try:
        return make(store, rank, degree, timeout=timedelta(seconds=call_s))
    except (RuntimeError, distributed.DistStoreError) as error:
        raise RankLost(f"ranks have not met: {error}") from error


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _call(group, call: Callable) -> None:
    try:
        call(group).wait()
    except RuntimeError as error:
        raise RankLost(f"a rank is lost: {one_line(error, 160)}") from error


def add_tree(parts: Tensor, dtype: torch.dtype, bias: Tensor | None = None, first: int = 0) -> Tensor:
    """Add as add_ranks.py does."""
    total = parts.float()
    while len(total) > 1:
        total = total[0::2] + total[1::2]
    total = total[0]
    if bias is not None:
        total = total + bias[(first + torch.arange(len(total), device=total.device)) % len(bias)]
    return total.to(dtype)
