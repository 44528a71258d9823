"""The parts of blocks that layers with a window have, in a model where others see all: who sees each, and whether it is there.

        seen ──── leave ────► idle ──── drop ────► gone         while the block stays with its holders, or in the cache
          ◄──── share ────────┘     oldest first

Every holder of a block sees its part until it leaves that, or the block. What nobody sees stays where it is until its room is
needed, so that a prefix can be found by its window again.
"""

from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from baton.engine.kv.window import Window


class Pages(Protocol):
    """What BlockPages does."""

    def give_back(self, block_id: int) -> None: ...
    def give_back_part(self, block_id: int) -> None: ...


class WindowParts:
    """Guarded by the lock of the ledger that it is part of."""

    def __init__(self, num_blocks: int, num_ids: int, window: Window, pages: Pages):
        """`num_blocks`: whole ones, that there is memory for; `num_ids`: that have places."""
        self.window, self.num_ids = window, num_ids
        self.num_bytes = num_blocks * window.block_bytes
        self._pages = pages
        self._num_seeing = [0] * num_ids
        self._is_there = bytearray(num_ids)
        self._idle: OrderedDict[int, int] = OrderedDict()  # seen least recently first, and when that was
        self.num_seen = 0

    @property
    def oldest(self) -> float:
        """Return when the one that was seen least recently was left."""
        return next(iter(self._idle.values()), float("inf"))

    @property
    def num_left(self) -> int:
        """Return how many are there and nobody sees."""
        return len(self._idle)

    def bytes_of(self, num_blocks: int, num_parts: int) -> int:
        """Return the bytes of blocks of which so many have their part."""
        return num_blocks * (self.window.block_bytes - self.window.part_bytes) + num_parts * self.window.part_bytes

    def has_room(self, num_held: int, num: int) -> bool:
        """Return whether `num` whole blocks fit beside `num_held` with what is there of them."""
        return self.bytes_of(num_held + num, self.num_seen + self.num_left + num) <= self.num_bytes

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Return how many of these are there and nobody sees."""
        return sum(block_id in self._idle for block_id in block_ids)

    def are_there(self, block_ids: Iterable[int]) -> bool:
        return all(self._is_there[block_id] for block_id in block_ids)

    def take(self, block_ids: Iterable[int]) -> None:
        """Blocks have a first holder."""
        for block_id in block_ids:
            self._is_there[block_id] = True
            self._num_seeing[block_id] = 1
            self.num_seen += 1

    def see(self, block_ids: Sequence[int]) -> None:
        """One more sees them, which are there."""
        for block_id in block_ids:
            assert self._is_there[block_id], f"the part of block {block_id} is gone"
            self._idle.pop(block_id, None)
            self.num_seen += not self._num_seeing[block_id]
            self._num_seeing[block_id] += 1

    def leave(self, block_ids: Sequence[int], now: int) -> None:
        """One sees them no more, the last one the least recently."""
        for block_id in reversed(block_ids):
            assert self._num_seeing[block_id], f"nobody sees the part of block {block_id}"
            self._num_seeing[block_id] -= 1
            if not self._num_seeing[block_id]:
                self.num_seen -= 1
                self._idle[block_id] = now

    def drop(self) -> None:
        """The part that was seen least recently goes. KeyError where there is none."""
        block_id, _ = self._idle.popitem(last=False)
        self._is_there[block_id] = False
        self._pages.give_back_part(block_id)

    def freed(self, block_id: int) -> None:
        """Nobody holds the block: all of it goes back."""
        self._idle.pop(block_id, None)
        self._is_there[block_id] = False
        self._pages.give_back(block_id)

    def num_usable(self, block_ids: Sequence[int], per_unit: int, whole: bool) -> int:
        """Return how many of a prefix's blocks, whole units, can be gone on behind: of those in the window of the next token, or of
        the `whole` prefix, the part is there."""
        lacking = [index for index, block_id in enumerate(block_ids) if not self._is_there[block_id]]
        for num in range(len(block_ids), 0, -per_unit):
            last = bisect(lacking, num - 1)  # of those that lack it before, one behind the last
            num_outside = 0 if whole else self.window.num_outside(num * self.window.block_size)
            if not last or lacking[last - 1] < num_outside:
                return num
        return 0

    def check(self, is_held: Sequence[bool], is_free: Sequence[bool]) -> None:
        """Raise AssertionError unless what is seen is held and there, what is idle is there, and nothing else is."""
        assert self.num_seen == sum(map(bool, self._num_seeing))
        for block_id, num_seeing in enumerate(self._num_seeing):
            assert num_seeing >= 0 and (not num_seeing or is_held[block_id]), f"part {block_id} is seen by no holder"
            assert bool(self._is_there[block_id]) == (num_seeing > 0 or block_id in self._idle), f"part {block_id}"
            assert not (num_seeing and block_id in self._idle) and not (is_free[block_id] and self._is_there[block_id])
        assert self.has_room(self.num_ids - sum(is_free), 0), "more is there than there is memory for"

    def check_seen(self, seen: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless each is seen by exactly those that name it."""
        expected = [0] * self.num_ids
        for block_ids in seen:
            for block_id in block_ids:
                expected[block_id] += 1
        wrong = [block_id for block_id, num in enumerate(expected) if num != self._num_seeing[block_id]]
        assert not wrong, f"parts {wrong}: counted {[self._num_seeing[each] for each in wrong]}, seen otherwise"
