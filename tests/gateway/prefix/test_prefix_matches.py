"""Matches of a prompt's spans on workers, as bits."""

import random

from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import worker_pb2 as pb
from gateway.prefix.memory_index import MemoryIndex
from gateway.prefix.prefix_matches import Matches, WorkerBits

SPANS = [bytes([i]) * 32 for i in range(8)]


@given(st.dictionaries(st.integers(0, 9).map(lambda i: b"w%d" % i), st.integers(0, 8)))
def test_what_is_said_of_each(held):
    workers = dict(enumerate(held))
    bits = [sum(1 << i for i, worker in workers.items() if held[worker] > at) for at in range(8)]
    matches = Matches(bits, WorkerBits.of(workers))
    assert matches == {worker: num for worker, num in held.items() if num}
    lengths = [held[worker] for worker in matches]
    assert lengths == sorted(lengths, reverse=True) and len(lengths) == len(matches)
    assert all(matches.get(worker) == num for worker, num in held.items()) and matches.get(b"stranger") == 0


def test_those_that_hold_as_much_come_first_in_turn():
    for num in (50, 500):
        bits, worker_bits = (1 << num) - 1, WorkerBits.of({i: b"%d" % i for i in range(num)})
        first = [next(iter(Matches([bits], worker_bits, random.Random(seed)))) for seed in range(2 * num)]
        assert len(set(first)) > num / 2


def test_what_a_worker_has_read_meanwhile_counts_first():
    matches = Matches([0b11, 0b10], WorkerBits.of({0: b"a", 1: b"b"}))
    for num_spans in (3, 5):
        matches.note(b"a", num_spans)
        assert list(matches) == [b"a", b"b"] and matches == {b"a": num_spans, b"b": 2}
    matches.note(b"new", 6)
    assert list(matches) == [b"new", b"a", b"b"]


async def test_the_embedded_index_follows_its_workers():
    index, asked = MemoryIndex(), []
    for worker in (b"a", b"b"):
        index.join(worker, lambda: asked.append(1))
    index.apply(b"a", pb.BlockEvents(seq=0, snapshot=True, sealed=SPANS[:4]))
    index.apply(b"b", pb.BlockEvents(seq=0, snapshot=True, sealed=SPANS[:2]))
    before = await index.lookup(SPANS)
    assert before == {b"a": 4, b"b": 2} and len(asked) == 2
    index.apply(b"a", pb.BlockEvents(seq=1, evicted=SPANS[1:2]))
    assert await index.lookup(SPANS) == {b"a": 1, b"b": 2}
    index.drop(b"a")
    index.join(b"c", lambda: None)  # where "a" was
    assert await index.lookup(SPANS) == {b"b": 2} and before == {b"a": 4, b"b": 2}
    index.drop(b"b")
    index.drop(b"c")
    assert not await index.lookup(SPANS) and not index._holders
