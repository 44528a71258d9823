"""The parts of a fetch, over real sockets: what all ranks have verified is verified, and nothing lands once a fetch has
ended."""

import asyncio
import math
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from baton.worker.ranks import fetches
from baton.worker.ranks.fetches import RankedFetcher, RankFetches
from baton.worker.ranks.notes import LocalStream
from baton.worker.ranks.taker import RankTaker
from kvtransfer.errors import DigestMismatch, PeerLost
from kvtransfer.layout import BlockRef
from kvtransfer.transfer.fetcher import FetchReport
from tests.support.waiting import until_async
from tests.support.worker.scripted import run_bounded

NUM_TOKENS = 192
BLOCKS = [BlockRef(index, 7) for index in range(12)]


class Destination:
    """Blocks of one request; `raises` at its next verification."""

    num_cached_tokens = 0

    def __init__(self):
        self.told: list[int] = []
        self.raises: Exception | None = None

    def set_aside(self, upto_token):
        return BLOCKS[: -(-upto_token // 16)]

    def verified(self, upto_token):
        if self.raises is not None:
            raise self.raises
        self.told.append(upto_token)

    async def caught_up(self):
        """Nothing goes anywhere else."""


class Pulling:
    """A Fetcher that a test drives: `go` lets it verify more, or end with an error; `num_running` fetches may still
    write."""

    def __init__(self, num_bytes: int, transport: str):
        self.go: asyncio.Queue[int | Exception] = asyncio.Queue()
        self.num_running = 0
        self.blocks, self.deadline = [], 0.0
        self._report = FetchReport(NUM_TOKENS, num_bytes, 0, transport, "exact", 0.1, 0.0, f"{transport} (why)")

    async def fetch(self, handle, ticket, destination, deadline):
        assert (handle, ticket) == (b"handle", b"ticket")
        self.blocks, self.deadline = list(destination.set_aside(NUM_TOKENS)), deadline
        self.num_running += 1
        try:
            while not isinstance(upto := await self.go.get(), Exception):
                destination.verified(upto)
                if upto == NUM_TOKENS:
                    return self._report
            raise upto
        finally:
            await asyncio.sleep(0.01)  # as one whose copy has not passed yet
            self.num_running -= 1

    def close(self):
        pass


@asynccontextmanager
async def group(monkeypatch):
    """A worker of three ranks: (fetcher, what each pulls, the other ranks' ends of their streams)."""
    handle = SimpleNamespace(prompt=SimpleNamespace(num_tokens=NUM_TOKENS))
    monkeypatch.setattr(fetches, "decode_handle", lambda data: handle)
    pulling = [Pulling(100, "shm"), Pulling(200, "shm"), Pulling(300, "tcp")]
    others, ends, streams = [], [], []
    for each in pulling[1:]:
        own, theirs = map(LocalStream, socket.socketpair())
        others.append(RankFetches(own))
        own.on_note, own.on_end = others[-1].handle_note, others[-1].lose
        theirs.on_note = RankTaker(each, theirs.send_note).handle_note
        streams.append(own)
        ends.append(theirs)
    for stream in (*streams, *ends):
        await stream.start()
    yield RankedFetcher(pulling[0], others), pulling, ends
    for stream in ends:
        stream._writer.close()
    for stream in streams:
        await stream.stop()


def begin(fetcher: RankedFetcher, destination: Destination) -> asyncio.Task:
    return asyncio.create_task(fetcher.fetch(b"handle", b"ticket", destination, math.inf))


def test_what_all_ranks_have_is_verified(monkeypatch):
    async def main():
        async with group(monkeypatch) as (fetcher, pulling, _):
            destination = Destination()
            fetching = begin(fetcher, destination)
            for upto, ranks in ((64, (0, 1)), (128, (1,)), (64, (2,)), (NUM_TOKENS, (0, 1, 2))):
                for rank in ranks:
                    pulling[rank].go.put_nowait(upto)
                await until_async(lambda: all(each.go.empty() for each in pulling))
            report = await fetching
            assert destination.told == [64, NUM_TOKENS] and all(each.blocks == BLOCKS for each in pulling)
            assert pulling[1].deadline == math.inf
            assert (report.num_tokens, report.num_bytes, report.transport) == (NUM_TOKENS, 600, "shm+tcp")
            assert report.reason == "shm (why); tcp (why)"

    run_bounded(main)


@pytest.mark.parametrize("how", ["cancelled", "failed there", "failed here", "its key has ended"])
def test_one_that_ends_early_ends_everywhere_first(monkeypatch, how):
    async def main():
        async with group(monkeypatch) as (fetcher, pulling, _):
            destination = Destination()
            fetching = begin(fetcher, destination)
            await until_async(lambda: all(each.num_running for each in pulling))
            expected = ValueError
            match how:
                case "cancelled":
                    fetching.cancel()
                    expected = asyncio.CancelledError
                case "failed there":
                    pulling[2].go.put_nowait(DigestMismatch("3 cells"))
                    expected = DigestMismatch
                case "failed here":
                    pulling[0].go.put_nowait(PeerLost("gone"))
                    expected = PeerLost
                case _:
                    destination.raises = ValueError("ended")
                    for each in pulling:
                        each.go.put_nowait(64)
            with pytest.raises(expected):
                await fetching
            assert not any(each.num_running for each in pulling)
            assert not any(other._open for other in fetcher._others)

    run_bounded(main)


def test_a_rank_that_is_gone(monkeypatch):
    """In the middle of a fetch, and before the next one."""

    async def main():
        async with group(monkeypatch) as (fetcher, pulling, ends):
            fetching = begin(fetcher, Destination())
            await until_async(lambda: all(each.num_running for each in pulling))
            ends[1]._writer.transport.abort()
            for task in (fetching, begin(fetcher, Destination())):
                with pytest.raises(PeerLost, match="a rank of this worker is gone"):
                    await task
            assert not pulling[0].num_running and not pulling[1].num_running

    run_bounded(main)
