"""The prefix index in memory: what the workers of this one gateway say."""

from collections.abc import Callable, Sequence

from baton.v1 import worker_pb2 as pb
from gateway.prefix_index import Feed
from kvtransfer.naming import num_matched_spans


class EmbeddedIndex:
    """See PrefixIndex."""

    def __init__(self) -> None:
        self._feeds: dict[bytes, Feed] = {}

    async def lookup(self, hashes: Sequence[bytes]) -> dict[bytes, int]:
        matches = ((num_matched_spans(hashes, feed.spans), worker) for worker, feed in self._feeds.items())
        return {worker: num_spans for num_spans, worker in sorted(matches) if num_spans}

    def join(self, worker: bytes, subscribe: Callable[[], None]) -> None:
        self._feeds[worker] = feed = Feed(subscribe)
        feed.subscribe()

    def apply(self, worker: bytes, events: pb.BlockEvents) -> None:
        if feed := self._feeds.get(worker):
            feed.apply(events)

    def drop(self, worker: bytes) -> None:
        self._feeds.pop(worker, None)
