"""Pull KV for a worker with stages on other hosts. The worker's pool receives all of it; the KV of the other hosts'
layers is sent on over the streams that carry their steps, and written there before it counts as verified. So later
ranges are acknowledged no faster than these stages write."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from baton.engine.kv.pool import KVPool
from baton.engine.parallel.collectives import RankLost
from baton.engine.parallel.pipeline import put_message
from baton.worker.ranks.listener import JoiningRank
from kvtransfer.errors import TransferFailed
from kvtransfer.layout import BlockRef
from kvtransfer.transfer.destination import Destination
from kvtransfer.transfer.dialogue import together
from kvtransfer.transfer.fetcher import Fetcher, FetchReport

PIECE_BYTES = 1 << 20  # per message; a step waits for one message at most


class _Relay:
    """The destination of a fetch: send verified blocks on, and then tell `whole`."""

    def __init__(self, whole: Destination, block_size: int, give: Callable[[Sequence[BlockRef]], Awaitable[None]]):
        self.num_cached_tokens = self._given = self._verified = whole.num_cached_tokens
        self._whole, self._block_size, self._give = whole, block_size, give
        self._giving = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None  # sends while the fetch waits for more

    def set_aside(self, upto_token: int) -> Sequence[BlockRef]:
        return self._whole.set_aside(upto_token)

    def state_block(self) -> BlockRef:
        return self._whole.state_block()

    def verified(self, upto_token: int) -> None:
        self._verified = upto_token
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._give_early(), name="KV to other hosts")

    async def caught_up(self) -> None:
        async with self._giving:
            while (upto := self._verified) > self._given:
                blocks = self._whole.set_aside(upto)[self._given // self._block_size : -(-upto // self._block_size)]
                await self._give(blocks)
                self._given = upto
                self._whole.verified(upto)

    async def stop(self) -> None:
        """Stop sending."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _give_early(self) -> None:
        with suppress(Exception):  # `caught_up` raises it again when the fetch calls it
            await self.caught_up()


class RelayingFetcher:
    """Pull with the worker's Fetcher, and send KV on to ranks of other hosts. Used in the event loop only."""

    def __init__(self, own: Fetcher, pool: KVPool, ranks: Sequence[JoiningRank]):
        self._own, self._pool, self._ranks = own, pool, ranks

    async def fetch(self, handle: bytes, ticket: bytes, destination: Destination, deadline: float) -> FetchReport:
        """Pull as Fetcher.fetch does: after it has ended, no more bytes land in the ranks either."""
        relay = _Relay(destination, self._pool.block_size, self._give)
        try:
            return await self._own.fetch(handle, ticket, relay, deadline)
        finally:
            await relay.stop()

    async def _give(self, blocks: Sequence[BlockRef]) -> None:
        """Send blocks to all ranks. Raises TransferFailed if a rank is gone."""
        try:
            await together([self._give_rank(rank, blocks) for rank in self._ranks])
        except RankLost:
            raise TransferFailed("a rank of this worker is gone") from None

    async def _give_rank(self, rank: JoiningRank, blocks: Sequence[BlockRef]) -> None:
        step = max(1, PIECE_BYTES // self._pool.layer_bytes)
        for block in blocks:
            for begin in range(0, len(rank.layers), step):
                layers = rank.layers[begin : begin + step]
                data = self._pool.layers_of_block(block.block_id, layers)
                await rank.stream.send_kv(*put_message(block.block_id, layers.start, data))
        await rank.stream.kv_written()  # else a note about a lease, read by another thread there, could overtake the KV
