"""The parts of blocks that layers with a window have, in a model where others see all: who sees each, and whether it is
there.

        seen ──── leave ────► left ──── drop ────► gone         while the block stays with its holders
          ◄──── share ────────┘     oldest first

Every holder of a block sees its part until it leaves that, or the block. What nobody sees stays where it is until its
room is needed, so that a prefix can be found by its window again; in a block that the cache alone holds it goes when
that is evicted. Blocks that are free keep their pages too, as long as there is memory for them: to give pages back
costs as much as to write them.
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
        # Of held blocks, seen least recently first, and when that was.
        self._left = OrderedDict[int, int]()
        self.num_seen = 0
        self.num_there = 0
        self.num_warm = 0  # free blocks that have pages, the last of the free ones

    @property
    def oldest(self) -> float:
        """Return when the one that was seen least recently was left."""
        return next(iter(self._left.values()), float("inf"))

    def bytes_of(self, num_blocks: int, num_parts: int) -> int:
        """Return the bytes of blocks of which so many have their part."""
        return num_blocks * (self.window.block_bytes - self.window.part_bytes) + num_parts * self.window.part_bytes

    def has_room(self, free: Sequence[int], num: int) -> bool:
        """Return whether there is memory for all of the last `num` of the `free` blocks beside what is there."""
        num_blocks = self.num_ids - len(free) + max(self.num_warm, num)
        num_lacking = sum(not self._is_there[block_id] for block_id in free[len(free) - num :])
        return self.bytes_of(num_blocks, self.num_there + num_lacking) <= self.num_bytes

    def num_unseen(self, block_ids: Iterable[int]) -> int:
        return sum(not self._num_seeing[block_id] for block_id in block_ids)

    def are_there(self, block_ids: Iterable[int]) -> bool:
        return all(self._is_there[block_id] for block_id in block_ids)

    def take(self, block_ids: Sequence[int]) -> None:
        """The last of the free blocks have a first holder."""
        self.num_warm = max(0, self.num_warm - len(block_ids))
        for block_id in block_ids:
            self.num_there += not self._is_there[block_id]
            self._is_there[block_id] = True
            self._num_seeing[block_id] = 1
            self.num_seen += 1

    def see(self, block_ids: Sequence[int]) -> None:
        """One more sees them, which are there."""
        for block_id in block_ids:
            assert self._is_there[block_id], f"the part of block {block_id} is gone"
            self._left.pop(block_id, None)
            self.num_seen += not self._num_seeing[block_id]
            self._num_seeing[block_id] += 1

    def leave(self, block_ids: Sequence[int], now: int) -> None:
        """One sees them no more, the last one the least recently."""
        for block_id in reversed(block_ids):
            assert self._num_seeing[block_id], f"nobody sees the part of block {block_id}"
            self._num_seeing[block_id] -= 1
            if not self._num_seeing[block_id]:
                self.num_seen -= 1
                self._left[block_id] = now

    def on_held(self, block_ids: Sequence[int], now: int) -> None:
        """Blocks have a holder that does not see them: the cache alone may have held them before."""
        for block_id in block_ids:
            if self._is_there[block_id] and not self._num_seeing[block_id]:
                self._left.setdefault(block_id, now)

    def on_cached(self, block_id: int) -> None:
        """The cache alone holds the block."""
        self._left.pop(block_id, None)

    def on_freed(self, block_id: int) -> None:
        """Nobody holds the block, which is the last of the free ones."""
        self._left.pop(block_id, None)
        self.num_warm += 1

    def drop(self) -> None:
        """The part that was seen least recently goes. KeyError where there is none."""
        block_id, _ = self._left.popitem(last=False)
        self._gone(block_id)
        self._pages.give_back_part(block_id)

    def cool(self, free: Sequence[int]) -> None:
        """Give back the pages of the first `free` block that has some."""
        block_id = free[len(free) - self.num_warm]
        self.num_warm -= 1
        if self._is_there[block_id]:
            self._gone(block_id)
        self._pages.give_back(block_id)

    def _gone(self, block_id: int) -> None:
        self._is_there[block_id] = False
        self.num_there -= 1

    def num_usable(self, block_ids: Sequence[int], per_unit: int, whole: bool) -> int:
        """Return how many of a prefix's blocks, whole units, can be gone on behind: of those in the window of the next
        token, or of the `whole` prefix, the part is there."""
        lacking = [index for index, block_id in enumerate(block_ids) if not self._is_there[block_id]]
        for num in range(len(block_ids), 0, -per_unit):
            last = bisect(lacking, num - 1)  # of those that lack it before, one behind the last
            num_outside = 0 if whole else self.window.num_outside(num * self.window.block_size)
            if not last or lacking[last - 1] < num_outside:
                return num
        return 0

    def check(self, is_held: Sequence[bool], free: Sequence[int]) -> None:
        """Raise AssertionError unless what is seen is held and there, what was left too, and there is memory for all of
        it."""
        assert self.num_seen == sum(map(bool, self._num_seeing)) and self.num_there == sum(self._is_there)
        for block_id, num_seeing in enumerate(self._num_seeing):
            assert num_seeing >= 0 and (not num_seeing or is_held[block_id]), f"part {block_id} is seen by no holder"
            is_left = bool(self._is_there[block_id]) and is_held[block_id] and not num_seeing
            assert is_left == (block_id in self._left) and (not num_seeing or self._is_there[block_id]), (
                f"part {block_id}"
            )
        assert 0 <= self.num_warm <= len(free)
        assert not any(self._is_there[block_id] for block_id in free[: len(free) - self.num_warm])
        assert self.has_room(free, 0), "more is there than there is memory for"

    def check_seen(self, seen: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless each is seen by exactly those that name it."""
        expected = [0] * self.num_ids
        for block_ids in seen:
            for block_id in block_ids:
                expected[block_id] += 1
        wrong = [block_id for block_id, num in enumerate(expected) if num != self._num_seeing[block_id]]
        assert not wrong, f"parts {wrong}: counted {[self._num_seeing[each] for each in wrong]}, seen otherwise"
