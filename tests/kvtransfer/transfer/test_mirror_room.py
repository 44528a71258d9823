"""The host memory that a mirror takes: bounded, and nobody waits for ever."""

import asyncio

import numpy as np
import pytest

from kvtransfer.errors import DigestMismatch
from kvtransfer.transfer.mirror_room import MirrorRoom, RoomUse, Side
from tests.support.kvtransfer.rig import NUM_BLOCKS, assert_still_serves, kind, layout, running
from tests.support.waiting import until_async

SOURCE, TAKER = Side.SOURCE, Side.TAKER


def blocks(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def make_room(most: int) -> tuple[MirrorRoom, list[tuple[int, int]]]:
    dropped: list[tuple[int, int]] = []
    return MirrorRoom(16, most, lambda first, count: dropped.append((first, count))), dropped


def test_what_was_used_longest_ago_goes_first():
    room, dropped = make_room(4)

    async def use(*ids):
        await room.enter(TAKER, blocks(*ids))
        room.leave(TAKER, blocks(*ids))

    async def main():
        await use(0, 1)
        await use(2, 3)
        await use(0)
        assert dropped == [] and room.num_resident == 4
        await use(4, 5)
        assert dropped == [(1, 2)] and room.num_resident == 4
        await use(8, 9, 10, 11, 12, 13)  # larger than the room: alone
        assert room.num_resident == 6
        await use(1)
        assert room.num_resident == 4

    asyncio.run(main())


@pytest.mark.parametrize("side", Side)
def test_a_range_waits_for_room_and_those_behind_it_for_their_turn(side):
    room, _ = make_room(4)

    async def main():
        await room.enter(side, blocks(0, 1, 2))
        large = asyncio.create_task(room.enter(side, blocks(3, 4)))
        small = asyncio.create_task(room.enter(side, blocks(0)))  # would fit: but it came later
        await asyncio.sleep(0.01)
        assert not large.done() and not small.done()
        room.leave(side, blocks(0, 1, 2))
        async with asyncio.timeout(5):
            await asyncio.gather(large, small)

    asyncio.run(main())


def test_what_is_cancelled_leaves_nothing_behind():
    room, _ = make_room(4)

    async def main():
        await room.enter(SOURCE, blocks(0, 1, 2))
        waiting = asyncio.create_task(room.enter(SOURCE, blocks(3, 4)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        room.leave(SOURCE, blocks(0, 1, 2))
        async with asyncio.timeout(5):
            await room.enter(SOURCE, blocks(5, 6, 7))
        assert not room._num_users[:5].any()

    asyncio.run(main())


def test_ranges_that_wait_for_other_workers_leave_room_for_those_that_come():
    """Two workers that give to each other, both full of what the other has not taken yet, would wait for ever."""
    room, _ = make_room(4)

    async def main():
        await room.enter(SOURCE, blocks(0, 1, 2))
        given = asyncio.create_task(room.enter(SOURCE, blocks(3)))
        await asyncio.sleep(0.01)
        assert not given.done()
        async with asyncio.timeout(5):
            await room.enter(TAKER, blocks(4, 5, 6))  # more than is left: the first one that is taken never waits
        taken = asyncio.create_task(room.enter(TAKER, blocks(7)))
        await asyncio.sleep(0.01)
        assert not taken.done()
        room.leave(TAKER, blocks(4, 5, 6))
        async with asyncio.timeout(5):
            await taken
        given.cancel()
        await asyncio.gather(given, return_exceptions=True)

    asyncio.run(main())


def test_a_dialogue_leaves_once_for_each_range():
    room, _ = make_room(4)

    async def main():
        use = RoomUse(room, SOURCE)
        for name in "ab":
            await use.enter(name, blocks(1))
        use.leave("a")
        use.leave("a")
        assert room._num_users[1] == 1
        use.leave_all()
        assert not room._num_users.any()

    asyncio.run(main())


@pytest.mark.parametrize("name", ("shm", "tcp", "grpc"))
def test_a_prompt_crosses_by_a_mirror_smaller_than_itself(name, small_ranges):
    """Five blocks, two of which may have pages on either side; the others are given back before the last has come."""

    def room_of(region):
        size = len(region.memory) // NUM_BLOCKS
        return MirrorRoom(NUM_BLOCKS, 2, lambda first, count: region.discard(first * size, count * size))

    async def main():
        async with running(name, layout(64), on_gpu=(True, True), rooms=(room_of, room_of)) as rig:
            for index, region in enumerate(rig.regions):
                region.discard(0, len(region.memory))
                assert not any(region.memory), index
            await rig.fetch(rig.ready_offer(), rig.destination())
            assert rig.arrived()
            for room, region in zip(rig.rooms, rig.regions, strict=True):
                rows = np.frombuffer(region.memory, np.uint8).reshape(NUM_BLOCKS, -1)
                assert 0 < np.count_nonzero(rows.any(axis=1)) == room.num_resident <= 2
                await until_async(lambda: not room._num_users.any(), "all ranges have left")

    asyncio.run(main())


@pytest.mark.parametrize("ending", ("wrong bytes", "cancelled"))
def test_a_fetch_that_ends_in_the_middle_leaves_no_range_in_the_room(ending, small_ranges):
    """On either side: what stays there for good is missed by all fetches that follow."""

    def room_of(region):
        return MirrorRoom(NUM_BLOCKS, NUM_BLOCKS, lambda first, count: None)

    async def main():
        async with running("tcp", layout(64), on_gpu=(True, True), rooms=(room_of, room_of)) as rig:
            waits, destination = asyncio.Event(), rig.destination()
            destination.caught_up = waits.wait  # nothing is acknowledged: all that comes stays

            def spoil(frame, connection):
                if ending == "wrong bytes" and kind(frame) == "ready" and frame.ready.range.token_begin == 128:
                    frame.ready.digests[0] ^= 1
                return [frame]

            rig.source.fault = spoil
            fetching = asyncio.create_task(rig.fetch(rig.ready_offer(), destination))
            if ending == "cancelled":
                await until_async(
                    lambda: all(room._num_users.sum() >= 2 for room in rig.rooms), "both sides have ranges"
                )
                fetching.cancel()
            else:
                waits.set()
            with pytest.raises(DigestMismatch if ending == "wrong bytes" else asyncio.CancelledError):
                await fetching
            rig.source.cancel("k")
            await until_async(lambda: not any(room._num_users.any() for room in rig.rooms), "all ranges have left")
            await assert_still_serves(rig)

    asyncio.run(main())


def test_a_digest_that_reads_bytes_takes_room_for_them(small_ranges):
    """SHA-256 of a pool on a GPU: what is read of it crosses to the mirror."""
    entered: list[Side] = []

    class Counted(MirrorRoom):
        async def enter(self, side, ids):
            entered.append(side)
            await super().enter(side, ids)

    def room_of(region):
        return Counted(NUM_BLOCKS, 2, lambda first, count: None)

    async def main():
        for digest in ("sum", "sha256"):
            async with running("cuda_ipc", layout(64), rooms=(room_of, room_of), digest=digest) as rig:
                await rig.fetch(rig.ready_offer(), rig.destination())
                assert rig.arrived() and bool(entered) == (digest == "sha256")

    asyncio.run(main())
    assert set(entered) == set(Side)
