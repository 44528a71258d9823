"""Bound the host memory behind the mirror of a pool on a GPU.

The mirror has the pool's size and offsets, but has pages only where bytes have crossed. A range enters before its bytes
come, and leaves when nobody reads them in the mirror any more: a source's range once its taker has it, a taker's range
once it is on the GPU. Blocks that no range uses keep their pages until others need the room.

A source's ranges wait for other workers, which may themselves wait for room. So ranges of sources get three quarters of
the room at most. A taker's ranges wait for no other worker and always finish, so no two workers wait for each other."""

import asyncio
import math
from collections.abc import Callable
from enum import Enum

import numpy as np

from kvtransfer.transports.transport import run_blocking

SOURCES_PART = 0.75


class Side(Enum):
    """Say whether this worker sends or receives a range."""

    SOURCE = "source"
    TAKER = "taker"


class MirrorRoom:
    """Count the users of a mirror's blocks, and free the pages of unused ones. Called in the event loop only."""

    def __init__(self, num_blocks: int, most: int, drop: Callable[[int, int], None]):
        """Allow `most` (>= 1) blocks with pages. A single range with more blocks still enters when it is alone on its
        side. `drop(first block, count)` frees pages; it is called in a thread."""
        self.most = most
        self._drop = drop
        self._num_users = np.zeros(num_blocks, np.int32)
        self._used_at = np.zeros(num_blocks, np.int64)  # value of _clock at the last use; 0: no pages
        self._clock = 1
        self._num_ranges = dict.fromkeys(Side, 0)
        self._turns = {side: asyncio.Lock() for side in Side}
        self._dropping = asyncio.Lock()
        self._left = asyncio.Event()

    @property
    def num_resident(self) -> int:
        """Return how many blocks have pages."""
        return int(np.count_nonzero(self._used_at))

    async def enter(self, side: Side, ids: np.ndarray) -> None:
        """Wait until the distinct blocks `ids`, int64 [n], may have pages. `leave` ends this use of them."""
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
        """Note that `ids`, which are in use, get pages, and free pages of the least recently used idle blocks."""
        async with self._dropping:  # no block gets a new user while a thread frees its pages
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
    """Track the ranges of one dialogue that are in a mirror's room."""

    def __init__(self, room: MirrorRoom | None, side: Side):
        """Use `room`; with None every call returns at once."""
        self._room, self._side = room, side
        self._ids: dict[object, np.ndarray] = {}

    async def enter(self, name: object, ids: np.ndarray) -> None:
        """Wait until the range `name`, with blocks `ids`, may have pages."""
        if self._room is not None:
            await self._room.enter(self._side, ids)
            self._ids[name] = ids

    def leave(self, name: object) -> None:
        """Release the range `name`. Do nothing if it is not in the room."""
        ids = self._ids.pop(name, None)
        if self._room is not None and ids is not None:
            self._room.leave(self._side, ids)

    def leave_all(self) -> None:
        for name in list(self._ids):
            self.leave(name)
