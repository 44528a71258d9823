"""The index of prefixes that a gateway has without Redis."""

import hashlib

from baton.v1 import worker_pb2 as pb
from gateway.prefix.memory_index import MemoryIndex


async def test_the_embedded_index_follows_its_workers():
    spans = [hashlib.sha256(bytes([i])).digest() for i in range(6)]
    index, asked = MemoryIndex(), []
    index.join(b"a", lambda: asked.append("a"))
    index.join(b"b", lambda: asked.append("b"))
    index.apply(b"a", pb.BlockEvents(seq=0, snapshot=True, sealed=spans[:4]))
    index.apply(b"b", pb.BlockEvents(seq=0, snapshot=True))
    index.apply(b"b", pb.BlockEvents(seq=1, sealed=spans[:2]))
    assert await index.lookup(spans) == {b"a": 4, b"b": 2}
    index.apply(b"a", pb.BlockEvents(seq=1, evicted=spans[1:2]))
    assert await index.lookup(spans) == {b"a": 1, b"b": 2}
    assert asked == ["a", "b"]
    index.apply(b"b", pb.BlockEvents(seq=5, sealed=spans))
    assert asked == ["a", "b", "b"] and (await index.lookup(spans))[b"b"] == 2
    index.drop(b"a")
    index.apply(b"a", pb.BlockEvents(seq=2, sealed=spans))
    assert await index.lookup(spans) == {b"b": 2}
    assert await index.lookup([]) == {}
