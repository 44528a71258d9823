"""A connection that breaks, falls silent or is given up: nothing hangs, nothing lands afterwards."""

import asyncio
import time

import pytest

from kvtransfer import errors
from kvtransfer.transfer import dialogue, pull
from kvtransfer.transports import transport
from tests.support.kvtransfer.rig import NUM_TOKENS, InterceptedConnection, assert_still_serves, kind, running
from tests.support.waiting import until_async


def test_resumes_after_the_line_broke(name, small_ranges):
    async def main():
        async with running(name) as rig:
            broken = []

            def fault(frame, connection):
                if kind(frame) == "ready" and frame.ready.range.token_begin == 128 and not broken:
                    broken.append(frame)
                    connection.close()
                    return []
                return [frame]

            rig.source.fault = fault
            destination = rig.destination()
            report = await rig.fetch(rig.ready_offer(), destination)
            assert broken and rig.arrived() and destination.upto[-1] == NUM_TOKENS
            assert destination.upto == sorted(set(destination.upto)), "nothing is verified twice"
            assert report.num_tokens == NUM_TOKENS
            await rig.wait_released("k")

    asyncio.run(main())


def test_source_dies(name, small_ranges):
    async def main():
        async with running(name) as rig:
            destination = rig.destination()
            offer = rig.offer(num_ready_tokens=128)
            fetching = asyncio.create_task(rig.fetch(offer, destination))
            await until_async(lambda: destination.upto == [64, 128], "the first spans")
            await rig.source.stop()
            with pytest.raises(errors.TransferFailed):
                await fetching
            assert destination.upto == [64, 128] and rig.released == ["k"]

    asyncio.run(main())


def test_a_source_that_dies_at_the_goodbye_has_given_everything(name, monkeypatch):
    monkeypatch.setattr("kvtransfer.transfer.fetcher._PAUSES_S", (0.001,))

    async def main():
        async with running(name) as rig:
            dialer = rig.fetcher._dialer
            opened = dialer.open

            async def refuse(endpoint, shape):
                raise errors.PeerLost("it is gone")

            def fault(frame, connection):
                if kind(frame) == "end":
                    dialer.open = refuse
                    raise errors.PeerLost("it has just died")
                return [frame]

            async def reach(endpoint, shape):
                return InterceptedConnection(await opened(endpoint, shape), fault)

            dialer.open = reach
            report = await rig.fetch(rig.ready_offer(), rig.destination())
            assert dialer.open is refuse and rig.arrived() and report.transport == name

    asyncio.run(main())


def test_silent_source_is_lost(name, monkeypatch):
    """A source that is stopped in mid-dialogue: every wait ends, and so does the fetch."""
    monkeypatch.setattr("kvtransfer.transfer.fetcher._PAUSES_S", ())
    monkeypatch.setattr(dialogue, "RENEW_S", 0.02)
    monkeypatch.setattr(pull, "RENEW_S", 0.02)
    for module in ("socket_connection", "inproc", "grpc_stream"):
        monkeypatch.setattr(f"kvtransfer.transports.{module}.SILENCE_S", 0.2)

    async def main():
        async with running(name) as rig:
            rig.source.fault = lambda frame, connection: [] if kind(frame) == "renew" else [frame]
            with pytest.raises(errors.PeerLost, match="silent"):
                await rig.fetch(rig.offer(), rig.destination())

    asyncio.run(main())


def test_taker_dies_and_the_lease_expires(name, monkeypatch):
    async def main():
        async with running(name, ttl_s=0.3) as rig:
            fetching = asyncio.create_task(rig.fetch(rig.offer(num_ready_tokens=64), rig.destination()))
            await asyncio.sleep(0.05)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            await rig.wait_released("k")
            assert rig.source.counters["leases_expired"] == 1

    asyncio.run(main())


def test_dialogue_renews_the_lease(name, monkeypatch):
    monkeypatch.setattr(pull, "RENEW_S", 0.05)

    async def main():
        async with running(name, ttl_s=0.3) as rig:
            destination = rig.destination()
            fetching = asyncio.create_task(rig.fetch(rig.offer(), destination))
            await asyncio.sleep(0.8)
            rig.source.finish("k")
            await fetching
            assert rig.arrived()

    asyncio.run(main())


def test_a_fetch_past_its_deadline_times_out(name):
    async def main():
        async with running(name) as rig:
            destination = rig.destination()
            with pytest.raises(errors.TransferTimedOut):
                await rig.fetch(rig.offer(), destination, within_s=0.1)
            with pytest.raises(errors.TransferTimedOut):
                await rig.fetch(rig.offer("late"), destination, within_s=-1)
            assert destination.upto == []

    asyncio.run(main())


def test_source_cancels(name):
    async def main():
        async with running(name) as rig:
            destination = rig.destination()
            fetching = asyncio.create_task(rig.fetch(rig.offer(num_ready_tokens=64), destination))
            await until_async(lambda: destination.upto == [64], "the first span")
            rig.source.cancel("k")
            with pytest.raises(errors.TransferCancelled):
                await fetching
            assert rig.released == ["k"]
            await assert_still_serves(rig)

    asyncio.run(main())


@pytest.mark.parametrize("pause_s", (0.0, 0.001, 0.003, 0.01))
def test_no_byte_lands_after_cancel(name, pause_s, small_ranges, in_threads):
    async def main():
        async with running(name) as rig:
            offer = rig.offer(num_ready_tokens=64)
            fetching = asyncio.create_task(rig.fetch(offer, rig.destination()))
            await asyncio.sleep(pause_s)
            rig.source.finish("k")
            await asyncio.sleep(pause_s)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            rig.taker_pool[:] = 0x55
            await asyncio.sleep(0.05)
            rig.source.cancel("k")
            assert (rig.taker_pool == 0x55).all()
            await assert_still_serves(rig)

    asyncio.run(main())


def test_cancel_waits_for_the_copy(monkeypatch):
    """A thread in mid-copy cannot be stopped, so `fetch` must not return before it has ended."""
    monkeypatch.setattr(transport, "INLINE_BYTES", 0)
    ended = []
    place = pull.TakerDialogue._place_and_check

    def slow(self, *args):
        time.sleep(0.2)
        place(self, *args)
        ended.append(True)

    monkeypatch.setattr(pull.TakerDialogue, "_place_and_check", slow)

    async def main():
        async with running("shm") as rig:
            fetching = asyncio.create_task(rig.fetch(rig.ready_offer(), rig.destination()))
            await asyncio.sleep(0.1)
            fetching.cancel()
            await asyncio.sleep(0.01)
            fetching.cancel()  # once more, while it waits
            with pytest.raises(asyncio.CancelledError):
                await fetching
            assert ended

    asyncio.run(main())


def test_new_line_takes_over(name):
    """The taker comes back before the source has noticed that the old connection is dead."""

    async def main():
        async with running(name) as rig:
            offer, first = rig.offer(num_ready_tokens=64), rig.destination()
            second = rig.destination(num_cached_tokens=64)
            old = asyncio.create_task(rig.fetch(offer, first))
            await until_async(lambda: first.upto == [64], "the first span")
            new = asyncio.create_task(rig.fetch(offer, second))
            await asyncio.sleep(0.02)
            old.cancel()
            await asyncio.gather(old, return_exceptions=True)
            rig.source.finish("k")
            await new
            assert second.upto[-1] == NUM_TOKENS and rig.arrived(64)

    asyncio.run(main())
