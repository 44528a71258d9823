"""Sums by way of memory that all ranks reach, here of one process: the kernel writes each rank's share into all of
it."""

import os
import threading

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels, native
from baton.engine.parallel import add_ranks
from baton.engine.parallel.distributed import DistributedCollectives
from tests.engine.parallel.parts import SIZE, parts_of
from tests.support.native.ranks_in_threads import collectives_of, distributed_of, together

pytestmark = [
    pytest.mark.skipif(not kernels.INTERPRETED, reason="Triton's interpreter is off in this process"),
    pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there"),
]
MAX_ROWS = 4


class Pages:
    """Memory of one rank, as PeerMemory."""

    def __init__(self, buffers: list[torch.Tensor], rank: int, meet: threading.Barrier):
        self.own, self.addresses, self._meet = buffers[rank], [each.data_ptr() for each in buffers], meet

    def barrier(self, channel: int) -> None:
        self._meet.wait(30)


@pytest.fixture
def reach(monkeypatch):
    """Let all ranks reach each other; `swapped`: one of them takes the others' memory for another's."""
    one_at_a_time, add_peers = threading.Lock(), add_ranks.add_peers

    def locked(*arguments):
        with one_at_a_time:  # of Triton's interpreter
            add_peers(*arguments)

    monkeypatch.setattr(add_ranks, "add_peers", locked)

    def reach_all(ends, swapped: bool = False) -> None:
        buffers = [torch.zeros(8 * MAX_ROWS * SIZE, dtype=torch.uint8) for _ in ends]
        meet = threading.Barrier(len(ends))

        def make(store, shard, device, num_bytes):
            assert num_bytes == len(buffers[0])
            pages = Pages(buffers, shard.rank, meet)
            if swapped and shard.rank == 0:
                pages.addresses = [pages.addresses[0]] * len(ends)
            return pages

        together(ends, lambda end: end.reach(MAX_ROWS * SIZE, make))

    return reach_all


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_have_the_bits_of_shared_memory(degree, dtype, reach, monkeypatch):
    """One after the other, of the most rows, of one, and of more, which the library adds."""
    bias = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    calls, call_all = [], DistributedCollectives._all
    with distributed_of(degree) as ends:
        reach(ends)
        assert all(end.peers is not None for end in ends)
        monkeypatch.setattr(DistributedCollectives, "_all", lambda self, call: calls.append(0) or call_all(self, call))
        for num_rows in (MAX_ROWS, 1, MAX_ROWS + 1):
            parts = parts_of(degree, num_rows)

            def add(end):
                return end.sum(parts[end.shard.rank], dtype, bias)

            found, wanted = together(ends, add), together(collectives_of(degree), add)
            assert all(torch.equal(rows, wanted[0]) for rows in found)
            assert len(calls) == (2 * degree if num_rows > MAX_ROWS else 0)


def test_memory_that_gives_other_bits_is_not_used(reach):
    with distributed_of(2) as ends:
        reach(ends, swapped=True)
        assert [end.peers for end in ends] == [None, None]
        assert "other bits" in ends[0].why_no_peers
        parts = parts_of(2, 3)
        found = together(ends, lambda end: end.sum(parts[end.shard.rank], torch.float32))
    assert torch.equal(found[0], parts[0] + parts[1]) and torch.equal(found[1], found[0])


def test_ranks_on_a_cpu_do_not_try():
    with distributed_of(2) as ends:
        together(ends, lambda end: end.reach(SIZE))
        assert [end.why_no_peers for end in ends] == ["only exact sums of GPUs go that way"] * 2
