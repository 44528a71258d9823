"""Bound the host memory behind the mirror of a pool on a GPU.

The mirror has the pool's size and places, and pages only where bytes have crossed. A range enters before its bytes come
and leaves when nobody reads them there any more: a source's once its taker has them, a taker's once they are on the
GPU. Blocks that no range uses keep their pages until there is no room for others.

A source's ranges wait for other workers, which may wait for room of their own. So they have three quarters of the room,
and a taker's, which need nothing more of anybody, always come to their end: no two workers wait for each other.
"""

import asyncio
import math
from collections.abc import Callable
from enum import Enum

import numpy as np

from kvtransfer.transports.transport import run_blocking

SOURCES_PART = 0.75


class Side(Enum):
    """What this worker is to a range."""

    SOURCE = "source"
    TAKER = "taker"


class MirrorRoom:
    """The blocks of one mirror. Belongs to the event loop."""

    def __init__(self, num_blocks: int, most: int, drop: Callable[[int, int], None]):
        """`most`: blocks with pages, at least one; a single range that has more enters all the same, alone on its side.
        `drop(first block, how many)` gives their pages back; it is called in a thread."""
        self.most = most
        self._drop = drop
        self._num_users = np.zeros(num_blocks, np.int32)
        self._used_at = np.zeros(num_blocks, np.int64)  # by _clock; 0: it has no pages
        self._clock = 1
        self._num_ranges = dict.fromkeys(Side, 0)
        self._turns = {side: asyncio.Lock() for side in Side}
        self._dropping = asyncio.Lock()
        self._left = asyncio.Event()

    @property
    def num_resident(self) -> int:
        """Return the blocks that have pages."""
        return int(np.count_nonzero(self._used_at))

    async def enter(self, side: Side, ids: np.ndarray) -> None:
        """Wait until the different blocks `ids`, int64 [n], may have pages. Each is given back by `leave`."""
        async with self._turns[side]:
            while not self._fits(side, ids):
                self._left.clear()
                await self._left.wait()
            self._num_users[ids] += 1
            self._num_ranges[side] += 1
            try:
                await self._make_room(ids)
            except BaseException:
                self.leave(side, ids)
                raise

    def leave(self, side: Side, ids: np.ndarray) -> None:
        """End one use of blocks that have entered."""
        self._num_users[ids] -= 1
        self._num_ranges[side] -= 1
        self._left.set()

    def _fits(self, side: Side, ids: np.ndarray) -> bool:
        used = self._num_users > 0
        used[ids] = True
        part = SOURCES_PART if side is Side.SOURCE else 1.0
        return self._num_ranges[side] == 0 or int(np.count_nonzero(used)) <= part * self.most

    async def _make_room(self, ids: np.ndarray) -> None:
        """Give pages of `ids`, which are in use, and take those of others that are not: longest ago first."""
        async with self._dropping:  # what is dropped in a thread gets no new user before that is done
            self._clock += 1
            self._used_at[ids] = self._clock
            if (excess := self.num_resident - self.most) <= 0:
                return
            idle = np.flatnonzero((self._num_users == 0) & (self._used_at > 0))
            dropped = np.sort(idle[np.argsort(self._used_at[idle], kind="stable")[:excess]])
            self._used_at[dropped] = 0
            await run_blocking(math.inf, self._drop_all, dropped)

    def _drop_all(self, ids: np.ndarray) -> None:
        for run in np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1):
            if len(run):
                self._drop(int(run[0]), len(run))


class RoomUse:
    """The ranges of one dialogue that are in a mirror's room."""

    def __init__(self, room: MirrorRoom | None, side: Side):
        """room: None where none is needed: nothing waits then."""
        self._room, self._side = room, side
        self._ids: dict[object, np.ndarray] = {}

    async def enter(self, name: object, ids: np.ndarray) -> None:
        """`name`: of the range, by which it leaves."""
        if self._room is not None:
            await self._room.enter(self._side, ids)
            self._ids[name] = ids

    def leave(self, name: object) -> None:
        """Do nothing for a range that is not in it."""
        ids = self._ids.pop(name, None)
        if self._room is not None and ids is not None:
            self._room.leave(self._side, ids)

    def leave_all(self) -> None:
        for name in list(self._ids):
            self.leave(name)
