"""One suite for every transport: what any of them must do."""

import asyncio

import pytest

from tests.support.kvtransfer.rig import NUM_TOKENS, layout, running
from tests.support.waiting import until_async


@pytest.mark.parametrize("block_size", (1, 16, 64, 128))
@pytest.mark.parametrize("form", ("bf16", "int8"))
def test_all_blocks_arrive(name, block_size, form):
    async def main():
        num_tokens = 38 if block_size == 1 else NUM_TOKENS
        async with running(name, layout(block_size, form)) as rig:
            destination = rig.destination(num_tokens)
            report = await rig.fetch(rig.ready_offer(num_tokens=num_tokens), destination)
            assert rig.arrived(0, num_tokens) and destination.upto == [num_tokens]
            assert report.num_tokens == num_tokens and report.transport == name and name in report.reason
            assert report.num_bytes == rig.layout.block_bytes * num_tokens // block_size
            await rig.wait_released("k")

    asyncio.run(main())


def test_only_valid_bytes_of_the_tail_travel(name):
    async def main():
        async with running(name, layout(64)) as rig:
            rig.taker_pool[:] = 0xAA
            await rig.fetch(rig.ready_offer(), rig.destination())
            assert rig.arrived()
            last = rig.tokens(rig.taker_pool, rig.taker_ids, NUM_TOKENS, 320)
            assert (last == 0xAA).all(), "bytes behind the last token were read"

    asyncio.run(main())


def test_many_ranges_in_threads(name, small_ranges, in_threads):
    async def main():
        async with running(name) as rig:
            destination = rig.destination()
            await rig.fetch(rig.ready_offer(), destination)
            assert rig.arrived() and destination.upto == [64, 128, 192, 256, 300]

    asyncio.run(main())


def test_ranges_follow_the_watermark(name):
    """By chunks of tokens and by layers; nothing is verified before all its layers are there."""

    async def main():
        async with running(name) as rig:
            offer, destination = rig.offer(num_ready_tokens=64), rig.destination()
            fetching = asyncio.create_task(rig.fetch(offer, destination))
            await until_async(lambda: destination.upto == [64], "the cached prefix leaves at once")
            rig.source.advance("k", 192, 1)
            await asyncio.sleep(0.05)
            assert destination.upto == [64] and destination.asked[-1] == 192
            rig.source.advance("k", 192, 2)
            rig.source.advance("k", 192)
            await until_async(lambda: destination.upto == [64, 192], "all layers of the second chunk")
            rig.source.advance("k", 250)  # not a whole span: waits
            await until_async(lambda: destination.upto[-1] == 192, "spans only")
            rig.source.finish("k")
            report = await fetching
            assert destination.upto[-1] == NUM_TOKENS and rig.arrived()
            assert report.after_last_ready_s < report.transfer_s
            await rig.wait_released("k")

    asyncio.run(main())


def test_cached_prefix_does_not_move(name):
    async def main():
        async with running(name) as rig:
            rig.taker_pool[:] = 0
            destination = rig.destination(num_cached_tokens=128)
            report = await rig.fetch(rig.ready_offer(), destination)
            assert report.num_tokens == NUM_TOKENS - 128 and rig.arrived(128) and destination.upto == [NUM_TOKENS]
            assert not rig.tokens(rig.taker_pool, rig.taker_ids, 0, 128).any()

    asyncio.run(main())


def test_a_taker_that_has_all_of_it_ends_the_lease(name):
    """It says so and goes, as one that comes back does whose last word was lost."""

    async def main():
        async with running(name) as rig:
            await rig.fetch(rig.ready_offer(), rig.destination(num_cached_tokens=NUM_TOKENS))
            await rig.wait_released("k")
            assert rig.endings == {"k": "released"} and not rig.source.counters["peer_lost"]

    asyncio.run(main())


def test_a_lease_waits_for_finish(name):
    async def main():
        async with running(name) as rig:
            offer = rig.offer(num_ready_tokens=NUM_TOKENS)
            await rig.fetch(offer, rig.destination())
            await until_async(lambda: rig.source.num_connections == 0, "the end of the dialogue")
            assert rig.released == []
            rig.source.finish("k")
            assert rig.released == ["k"]

    asyncio.run(main())


def test_many_at_once(name, small_ranges):
    async def main():
        async with running(name) as rig:
            offers = [rig.offer(key) for key in range(80)]
            destinations = [rig.destination() for _ in offers]
            fetching = [asyncio.create_task(rig.fetch(*pair)) for pair in zip(offers, destinations)]
            for upto in (64, 192, NUM_TOKENS):
                for key in range(80):
                    rig.source.advance(key, upto)
                await asyncio.sleep(0.01)
            for key in range(80):
                rig.source.finish(key)
            await asyncio.gather(*fetching)
            assert all(destination.upto[-1] == NUM_TOKENS for destination in destinations) and rig.arrived()
            assert not rig.source.counters["digest_mismatch"]

    asyncio.run(main())
