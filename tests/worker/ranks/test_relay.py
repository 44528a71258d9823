"""KV that goes on to layers of other hosts: no more of it is on its way than they take, steps go before it, and what is
verified is there."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
import torch

from baton.engine.kv.pool import KVPool
from baton.engine.parallel.collectives import RankLost
from baton.engine.parallel.pipeline import COPY, PUT, PipelineFollower
from baton.worker.ranks import relay, stream
from baton.worker.ranks.relay import RelayingFetcher
from baton.worker.ranks.stream import JoinedStream
from kvtransfer.errors import TransferFailed
from kvtransfer.transfer import dialogue
from tests.support.kvtransfer.rig import NUM_BLOCKS, Rig, layout, running
from tests.support.waiting import until_async

LAYERS = range(1, 3)  # of three, on another host
SHAPE = layout(block_size=64)
LAYER_BYTES = SHAPE.block_bytes // 3
ROOM = 9 * LAYER_BYTES  # of the 80 that a prompt has there
NUM_TOKENS = 2500


class Rank:
    """Another host, to which a test brings messages: its thread takes none before `take`."""

    def __init__(self):
        self.here, self.there = JoinedStream(), JoinedStream()
        self.layers = LAYERS
        self.pool = KVPool(SHAPE, NUM_BLOCKS)
        self.wire: asyncio.Queue[bytes] = asyncio.Queue(1)
        back: asyncio.Queue[bytes] = asyncio.Queue(1)
        self._running = [
            asyncio.create_task(self.here.run(back.get, self.wire.put)),
            asyncio.create_task(self.there.run(self._arrive, back.put)),
        ]
        self._taking: asyncio.Task | None = None
        self.num_bytes = 0  # that have come
        self.heard: list[int] = []  # kinds of messages that its thread has taken

    @property
    def stream(self) -> JoinedStream:
        return self.here

    async def _arrive(self) -> bytes:
        piece = await self.wire.get()
        self.num_bytes += len(piece)
        return piece

    def take(self) -> None:
        def hear(kind, block, first_layer, data):
            self.heard.append(kind)
            if kind == PUT:
                self.pool.put_layers_of_block(block, first_layer, data)

        def follow():
            with suppress(RankLost):
                PipelineFollower(self.there, torch.zeros(1, 1)).receive(hear)

        self._taking = asyncio.create_task(asyncio.to_thread(follow))

    async def close(self) -> None:
        self.here.close()
        self.there.close()
        await asyncio.gather(*self._running)
        if self._taking is not None:
            await self._taking

    def has(self, rig: Rig) -> bool:
        """Return whether the layers of this host are those of the rig's source, for all tokens."""
        theirs = rig.tokens(rig.source_pool, rig.source_ids, 0, NUM_TOKENS)
        own = rig.tokens(self.pool.whole.numpy(), rig.taker_ids, 0, NUM_TOKENS)
        cells = theirs.shape[1] // 3  # of a layer
        of_layers = slice(LAYERS.start * cells, LAYERS.stop * cells)
        return bool((own[:, of_layers] == theirs[:, of_layers]).all())


@asynccontextmanager
async def relayed(monkeypatch, num_ranks: int = 1, num_spans: int = 5):
    """A rig whose source sends `num_spans` at a time, its taker's fetcher, and the ranks behind that; of 5 not all has
    room."""
    monkeypatch.setattr(dialogue, "FIRST_RANGE_BYTES", num_spans * SHAPE.block_bytes)
    monkeypatch.setattr(dialogue, "MAX_RANGE_BYTES", num_spans * SHAPE.block_bytes)
    monkeypatch.setattr(relay, "PIECE_BYTES", 2 * LAYER_BYTES)
    monkeypatch.setattr(stream, "MAX_KV_BYTES", ROOM)
    ranks = [Rank() for _ in range(num_ranks)]
    async with running("tcp", SHAPE) as rig:
        pool = KVPool(rig.layout, NUM_BLOCKS, rig.regions[1].memory)
        try:
            yield rig, RelayingFetcher(rig.fetcher, pool, ranks), ranks
        finally:
            for rank in ranks:
                await rank.close()


def begin(rig: Rig, fetcher: RelayingFetcher, destination) -> asyncio.Task:
    offer = rig.ready_offer(num_tokens=NUM_TOKENS)
    return asyncio.create_task(fetcher.fetch(offer.handle, offer.ticket, destination, float("inf")))


async def test_a_rank_that_takes_nothing_holds_the_source_back(monkeypatch):
    """No more than the bound waits for it, here or there, and the source sends no more either; then all of it comes."""
    async with relayed(monkeypatch) as (rig, fetcher, (rank,)):
        fetching = begin(rig, fetcher, destination := rig.destination(NUM_TOKENS))
        await until_async(lambda: rank.num_bytes > ROOM // 2, "the rank got nothing")
        confirmed = -1
        while (seen := rig.source.counters["bytes_confirmed"]) != confirmed:
            confirmed = seen
            await asyncio.sleep(0.2)
        assert rank.num_bytes <= ROOM + 1000  # the numbers in front of each message, too
        assert rank.here._outgoing.empty()
        assert confirmed < NUM_TOKENS // 2 * 3 * SHAPE.groups[0].num_kv_heads * 2 * 32
        rank.take()
        await fetching
        assert rank.has(rig) and rig.arrived(0, NUM_TOKENS) and destination.upto[-1] == NUM_TOKENS


async def test_what_is_verified_is_written_in_all_ranks(monkeypatch):
    """A rank is told to lease it by a note, which it hears in another thread: what came before would be given."""
    async with relayed(monkeypatch, 2, 1) as (rig, fetcher, (quick, slow)):
        fetching = begin(rig, fetcher, destination := rig.destination(NUM_TOKENS))
        quick.take()
        await until_async(lambda: slow.num_bytes > 2 * LAYER_BYTES, "the rank got nothing")
        await asyncio.sleep(0.1)
        assert not destination.upto
        slow.take()
        await fetching
        assert destination.upto[-1] == NUM_TOKENS and quick.has(rig) and slow.has(rig)


async def test_a_fetch_that_is_given_up_sends_nothing_more(monkeypatch):
    """Its blocks are another request's then."""
    async with relayed(monkeypatch) as (rig, fetcher, (rank,)):
        fetching = begin(rig, fetcher, destination := rig.destination(NUM_TOKENS))
        await until_async(lambda: rank.num_bytes > ROOM // 2, "the rank got nothing")
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        rank.here.send(torch.tensor((COPY, 1, 2)).numpy().tobytes())
        rank.take()
        await until_async(lambda: COPY in rank.heard and not rank.here._kv_under_way, "the rank heard nothing")
        await asyncio.sleep(0.1)
        assert rank.heard[-1] == COPY and NUM_TOKENS not in destination.upto
        rig.source.cancel("k")


async def test_a_rank_that_is_gone_ends_the_fetch(monkeypatch):
    async with relayed(monkeypatch) as (rig, fetcher, (rank,)):
        fetching = begin(rig, fetcher, destination := rig.destination(NUM_TOKENS))
        await until_async(lambda: rank.num_bytes > ROOM // 2, "the rank got nothing")
        rank.here.close()
        with pytest.raises(TransferFailed, match="a rank of this worker is gone"):
            await fetching
        assert NUM_TOKENS not in destination.upto
        rig.source.cancel("k")
