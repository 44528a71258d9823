"""KV between the two engines of a world as workers move it: a Source and a Fetcher of each, over a transport."""

import asyncio
from collections.abc import Sequence

from baton.engine.core.request import Key
from baton.engine.engine import Engine
from baton.worker.kv.convert import convert_rows
from baton.worker.kv.intake import EngineBlocks
from kvtransfer.errors import DigestMismatch, LayoutMismatch, ProtocolError
from kvtransfer.layout import BlockRef, PromptKV
from kvtransfer.memory.region import Region
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.transfer.fetcher import Fetcher
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.source import Source, SourceIdentity
from kvtransfer.transports.endpoints import Address
from kvtransfer.transports.transport import local_host_id

NEVER = (DigestMismatch, ProtocolError, LayoutMismatch)  # whatever happens to a key
LEASE_S = 600.0  # leases end when the plan says so
SPIN_S = 0.0005


class Wires:
    """Run its event loop only on request, so that everything else happens in between."""

    def __init__(self, engines: Sequence[Engine], regions: Sequence[Region], transport: str):
        self._engines, self._loop = engines, asyncio.new_event_loop()
        self._sources, self._fetchers = [], []
        for number, (engine, region) in enumerate(zip(engines, regions, strict=True)):
            numerics, instance = str(engine.numerics_class), bytes([number + 1]) * 16
            pool = LocalPool.of(region.memory, engine.layout, region=region)
            self._sources.append(
                Source(
                    pool, SourceIdentity(instance, number, engine.model_identity, numerics), local_host_id(),
                    lambda key, ending: None, generations=engine.ledger.generation, lease_ttl_s=LEASE_S,
                    transports=(transport,), codec=convert_rows,
                )
            )  # fmt: skip
            self._fetchers.append(
                Fetcher(pool, instance, number, local_host_id(), (transport,), numerics_class=numerics,
                        codec=convert_rows)
            )  # fmt: skip
            self._loop.run_until_complete(self._sources[number].start(Address()))

    def begin(
        self, taker: Engine, source: Engine, key: Key, lease: Key, blocks: Sequence[BlockRef], hashes: Sequence[bytes],
        parent: bytes, num_tokens: int, num_ready: int, num_cached: int,
    ) -> asyncio.Task:  # fmt: skip
        """Pull what is leased as `lease` for `key`."""
        fetcher = self._fetchers[self._engines.index(taker)]
        begin = num_cached // SPAN_TOKENS * SPAN_TOKENS
        taker_words = self._in_loop(fetcher.taker)
        offer = self._in_loop(
            lambda: self._sources[self._engines.index(source)].offer(
                lease,
                PromptKV(num_tokens, tuple(blocks), tuple(hashes), parent),
                taker_words,
                num_ready_tokens=num_ready,
            )
        )
        blocks_of_key = EngineBlocks(taker, key, min(begin, num_tokens), lambda token: None)
        return self._loop.create_task(fetcher.fetch(offer.handle, offer.ticket, blocks_of_key, float("inf")))

    def advance(self, source: Engine, lease: Key, upto_token: int) -> None:
        self._in_loop(lambda: self._sources[self._engines.index(source)].advance(lease, upto_token))

    def cancel(self, source: Engine, lease: Key) -> None:
        self._in_loop(lambda: self._sources[self._engines.index(source)].cancel(lease))

    def spin(self) -> None:
        """Do a little of what is under way."""
        self._loop.run_until_complete(asyncio.sleep(SPIN_S))

    def settle(self, task: asyncio.Task) -> BaseException | None:
        """End a fetch, after which no byte of it lands. Returns what it failed of, None where it has succeeded."""
        task.cancel()
        self._loop.run_until_complete(asyncio.wait([task]))
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        assert not isinstance(error, NEVER), f"a fetch failed: {type(error).__name__} {error}"
        return error

    def close(self) -> None:
        for fetcher in self._fetchers:
            fetcher.close()
        for source in self._sources:  # behind them: tasks that a fetcher has cancelled end meanwhile
            self._loop.run_until_complete(source.stop())
        self._loop.close()

    def _in_loop(self, call):
        async def calling():
            return call()

        return self._loop.run_until_complete(calling())
