"""Tickets, leases and generations, over every transport."""

import asyncio
import time

import pytest

from baton.v1 import kv_pb2
from kvtransfer import errors
from tests.support.kvtransfer.rig import Destination, assert_still_serves, kind, running
from tests.support.waiting import until_async


def test_forged_ticket(name):
    async def main():
        async with running(name) as rig:
            offer, destination = rig.ready_offer(), rig.destination()
            ticket = kv_pb2.Ticket.FromString(offer.ticket)
            ticket.mac = bytes(32)
            forged = offer._replace(ticket=ticket.SerializeToString())
            with pytest.raises(errors.TicketRefused):
                await rig.fetch(forged, destination)
            assert rig.source.counters["ticket_refused"] == 1 and destination.asked == destination.upto == []
            await rig.fetch(offer, destination)  # the true one still opens

    asyncio.run(main())


def test_another_takers_ticket(name):
    async def main():
        async with running(name) as rig:
            offer = rig.ready_offer()
            thief = rig.make_fetcher(b"decode-1", 23)
            deadline = time.monotonic() + 10
            with pytest.raises(errors.TicketRefused):  # its own side refuses
                await thief.fetch(offer.handle, offer.ticket, rig.destination(), deadline)
            thief._want = lambda ticket: kv_pb2.Want(
                ticket=kv_pb2.Ticket.FromString(ticket), taker_instance=b"decode-1", taker_epoch=23
            )
            with pytest.raises(errors.TicketRefused):  # and the source does
                await thief.fetch(offer.handle, offer.ticket, rig.destination(), deadline)
            assert rig.source.counters["ticket_refused"] == 1

    asyncio.run(main())


def test_expired_lease(name):
    async def main():
        async with running(name, ttl_s=0.1) as rig:
            offer = rig.ready_offer()
            await rig.wait_released("k")
            assert not rig.source.renew(offer.lease_id)
            with pytest.raises(errors.LeaseExpired):
                await rig.fetch(offer, rig.destination())
            assert rig.source.counters["lease_expired"] == 1

    asyncio.run(main())


def test_replay_of_a_finished_transfer(name):
    async def main():
        async with running(name) as rig:
            offer = rig.ready_offer()
            await rig.fetch(offer, rig.destination())
            await rig.wait_released("k")
            with pytest.raises(errors.LeaseExpired):
                await rig.fetch(offer, rig.destination())

    asyncio.run(main())


def test_generation_bumped_while_reading(name, small_ranges):
    """Blocks of the source given to another request between Ready and Ack: Confirm never comes."""

    async def main():
        async with running(name) as rig:

            def fault(frame, connection):
                if kind(frame) == "ready" and frame.ready.range.token_begin == 64:
                    rig.generation[int(rig.source_ids[4])] += 1
                return [frame]

            rig.source.fault = fault
            destination = rig.destination()
            with pytest.raises(errors.StaleBlocks):
                await rig.fetch(rig.ready_offer(), destination)
            assert destination.upto in ([], [64])
            rig.generation[int(rig.source_ids[4])] -= 1
            rig.source.cancel("k")
            await assert_still_serves(rig)

    asyncio.run(main())


def test_destination_loses_its_blocks(name, small_ranges):
    async def main():
        async with running(name) as rig:
            destination = rig.destination()
            offer = rig.offer(num_ready_tokens=64)
            fetching = asyncio.create_task(rig.fetch(offer, destination))
            await until_async(lambda: destination.upto == [64], "the first span")
            destination.blocks = [block._replace(generation=2) for block in destination.blocks]
            rig.source.finish("k")
            with pytest.raises(errors.StaleBlocks):
                await fetching
            assert destination.upto == [64]

    asyncio.run(main())


def test_destination_is_full(name):
    class Full(Destination):
        def set_aside(self, upto_token):
            raise MemoryError("no blocks")

    async def main():
        async with running(name) as rig:
            with pytest.raises(MemoryError):
                await rig.fetch(rig.ready_offer(), Full([]))
            rig.source.cancel("k")
            await assert_still_serves(rig)

    asyncio.run(main())
