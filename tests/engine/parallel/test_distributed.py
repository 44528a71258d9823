"""Sums and gathers over torch.distributed, here with gloo between threads, against those over shared memory: the exact
ones have the same bits, whatever the number of ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton.engine import native
from baton.engine.parallel import distributed
from baton.engine.parallel.collectives import RankLost, num_bytes_for
from baton.engine.parallel.distributed import DistributedCollectives, StageCollectives, add_tree
from baton.engine.parallel.shard import Shard
from tests.engine.parallel.parts import SIZE, parts_of
from tests.support.native.ranks_in_threads import collectives_of, distributed_of, together
from tests.support.pace import patience

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_exact_sums_have_the_bits_of_shared_memory(degree, dtype, has_bias):
    bias = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)) if has_bias else None
    with distributed_of(degree) as ends:
        for num_rows in (1, 3, 64):
            parts = parts_of(degree, num_rows)

            def add(end):
                return end.sum(parts[end.shard.rank], dtype, bias)

            found, wanted = together(ends, add), together(collectives_of(degree), add)
            for rows in found:
                assert torch.equal(rows, wanted[0])


def test_a_sum_does_not_depend_on_the_number_of_ranks():
    """Eight leaves: on one rank, on 2, 4 and 8 that have whole branches of their tree."""
    leaves = torch.stack(parts_of(8, 5))
    wanted = add_tree(leaves.flatten(1), torch.bfloat16).view(5, SIZE)
    for degree in (2, 4, 8):
        parts = [add_tree(own.flatten(1), torch.float32).view(5, SIZE) for own in leaves.chunk(degree)]
        with distributed_of(degree) as ends:
            found = together(ends, lambda end: end.sum(parts[end.shard.rank], torch.bfloat16))
        assert all(torch.equal(rows, wanted) for rows in found)


@pytest.mark.parametrize("degree", [2, 4])
def test_fast_sums_are_close(degree):
    parts = parts_of(degree, 7, torch.bfloat16)
    with distributed_of(degree, fast=True) as ends:
        found = together(ends, lambda end: end.sum(parts[end.shard.rank], torch.bfloat16))
    wanted = torch.stack(parts).double().sum(0)
    largest = torch.stack(parts).double().abs().sum(0)
    for rows in found:
        assert torch.equal(rows, found[0])
        assert ((rows.double() - wanted).abs() <= largest * degree * 2**-8).all()


def test_all_ranks_gather_and_are_sent_what_the_first_one_has():
    own = parts_of(4, 3, torch.bfloat16)
    with distributed_of(4) as ends:
        for gathered in together(ends, lambda end: end.gather(own[end.shard.rank])):
            assert torch.equal(gathered, torch.stack(own))
        told = [torch.full((5,), end.shard.rank) for end in ends]
        together(ends, lambda end: end.send(told[end.shard.rank]))
        assert all(each.eq(0).all() for each in told)


def test_a_lost_rank_ends_a_sum_of_another():
    with distributed_of(2) as ends:
        first, second = ends
        failed = []

        def wait():
            try:
                first.sum(torch.ones(1, SIZE), torch.float32)
            except RankLost as error:
                failed.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        second._group = None  # as where its process ends: its connections close
        waiting.join(10)
        assert not waiting.is_alive() and failed[0].startswith("a rank is lost")


def test_ranks_that_never_meet(monkeypatch, tmp_path):
    monkeypatch.setattr("baton.engine.parallel.distributed.JOIN_S", 0.3)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    memory = memoryview(bytearray(num_bytes_for(2)))
    first, other = (DistributedCollectives(memory, Shard(rank, 2), store, torch.device("cpu")) for rank in range(2))
    here = threading.Thread(target=other.least, args=(0,))  # and goes no further
    here.start()
    with pytest.raises(RankLost, match="ranks have not met"):
        first.join()
    here.join()


@pytest.mark.parametrize("kind", [DistributedCollectives, StageCollectives])
def test_the_time_to_meet_begins_when_all_have_their_parts(monkeypatch, tmp_path, kind):
    """A rank that read its part a minute before the first one gave the start up."""
    memory, began, late, met = memoryview(bytearray(num_bytes_for(2))), threading.Event(), threading.Event(), []
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    first, other = (kind(memory, Shard(rank, 2), store, torch.device("cpu")) for rank in range(2))
    first._add = other._add = add_tree  # threads: Triton's interpreter runs one kernel at a time
    least, meet = other.least, distributed._meet

    def least_noted(number: int) -> int:
        began.set()
        return least(number)

    def meet_noted(*given):
        began.set()
        met.append(late.is_set())
        return meet(*given)

    monkeypatch.setattr(other, "least", least_noted)
    monkeypatch.setattr(distributed, "_meet", meet_noted)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(other.join)
        assert began.wait(patience(30))
        late.set()
        first.join()
        joining.result(patience(30))
    assert met and all(met)
