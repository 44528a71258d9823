"""Count the users of each block's part: the KV of the layers with a window, in a model where other layers have none.

        used ─── release ───► unused ─ drop oldest ► absent       while the block stays with its holders
          ◄──────── use ──────┘       oldest first

Every holder of a block uses its part until the block is outside the holder's window, or released. An unused part stays
until its memory is needed, so that a cached prefix can be found by its window. In a block that only the cache holds,
the part goes when the block is evicted. Free blocks keep their pages as long as there is memory: giving pages back
costs as much as writing them.
"""

from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from baton.engine.kv.window import Window


class Pages(Protocol):
    """Give memory pages of blocks back to the system, as BlockPages does."""

    def give_back(self, block_id: int) -> None: ...
    def give_back_part(self, block_id: int) -> None: ...


class WindowParts:
    """Users and presence of the parts of a pool's blocks. Guarded by the lock of the ledger that owns it."""

    def __init__(self, num_blocks: int, num_ids: int, window: Window, pages: Pages):
        """Take the number of whole blocks that there is memory for, and the number of block ids (more than that)."""
        self.window, self.num_ids = window, num_ids
        self.num_bytes = num_blocks * window.block_bytes
        self._pages = pages
        self._num_users = [0] * num_ids
        self._is_present = bytearray(num_ids)
        # Held blocks whose part nobody uses, with the time of its last use; least recently used first.
        self._unused = OrderedDict[int, int]()
        self.num_used = 0
        self.num_present = 0
        self.num_warm = 0  # free blocks that still have pages; they are at the end of the free list

    @property
    def oldest(self) -> float:
        """The last use of the least recently used part, by PrefixCache.now."""
        return next(iter(self._unused.values()), float("inf"))

    def bytes_of(self, num_blocks: int, num_parts: int) -> int:
        """Return the bytes of `num_blocks` blocks of which `num_parts` have their part."""
        return num_blocks * (self.window.block_bytes - self.window.part_bytes) + num_parts * self.window.part_bytes

    def has_room(self, free: Sequence[int], num: int) -> bool:
        """Return whether there is memory to make the last `num` of the `free` blocks whole, beside all that is
        present."""
        num_blocks = self.num_ids - len(free) + max(self.num_warm, num)
        num_lacking = sum(not self._is_present[block_id] for block_id in free[len(free) - num :])
        return self.bytes_of(num_blocks, self.num_present + num_lacking) <= self.num_bytes

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks' parts nobody uses."""
        return sum(not self._num_users[block_id] for block_id in block_ids)

    def are_present(self, block_ids: Iterable[int]) -> bool:
        """Return whether the parts of all these blocks are present."""
        return all(self._is_present[block_id] for block_id in block_ids)

    def note_allocated(self, block_ids: Sequence[int]) -> None:
        """Note the first holder of blocks from the end of the free list: their parts are present and used."""
        self.num_warm = max(0, self.num_warm - len(block_ids))
        for block_id in block_ids:
            self.num_present += not self._is_present[block_id]
            self._is_present[block_id] = True
            self._num_users[block_id] = 1
            self.num_used += 1

    def use(self, block_ids: Sequence[int]) -> None:
        """Add a user to the parts of these blocks, which must be present."""
        for block_id in block_ids:
            assert self._is_present[block_id], f"the part of block {block_id} is gone"
            self._unused.pop(block_id, None)
            self.num_used += not self._num_users[block_id]
            self._num_users[block_id] += 1

    def release(self, block_ids: Sequence[int], now: int) -> None:
        """Remove a user from the parts of these blocks. The last block counts as least recently used."""
        for block_id in reversed(block_ids):
            assert self._num_users[block_id], f"nobody uses the part of block {block_id}"
            self._num_users[block_id] -= 1
            if not self._num_users[block_id]:
                self.num_used -= 1
                self._unused[block_id] = now

    def on_held(self, block_ids: Sequence[int], now: int) -> None:
        """Note a new holder that does not use the parts of these blocks, which only the cache may have held before."""
        for block_id in block_ids:
            if self._is_present[block_id] and not self._num_users[block_id]:
                self._unused.setdefault(block_id, now)

    def on_cached(self, block_id: int) -> None:
        """Note that only the cache holds the block."""
        self._unused.pop(block_id, None)

    def on_freed(self, block_id: int) -> None:
        """Note that nobody holds the block, now the last of the free list."""
        self._unused.pop(block_id, None)
        self.num_warm += 1

    def drop_oldest(self) -> None:
        """Give back the pages of the least recently used part. KeyError if there is none."""
        block_id, _ = self._unused.popitem(last=False)
        self._note_absent(block_id)
        self._pages.give_back_part(block_id)

    def give_back_free(self, free: Sequence[int]) -> None:
        """Give back the pages of the first free block that has any."""
        block_id = free[len(free) - self.num_warm]
        self.num_warm -= 1
        if self._is_present[block_id]:
            self._note_absent(block_id)
        self._pages.give_back(block_id)

    def _note_absent(self, block_id: int) -> None:
        self._is_present[block_id] = False
        self.num_present -= 1

    def num_usable(self, block_ids: Sequence[int], per_unit: int, whole: bool) -> int:
        """Return how many leading blocks of a cached prefix, whole units, a sequence can continue from.

        The parts must be present for the blocks in the next token's window, or for all blocks of a `whole` prefix.
        """
        lacking = [index for index, block_id in enumerate(block_ids) if not self._is_present[block_id]]
        for num in range(len(block_ids), 0, -per_unit):
            last = bisect(lacking, num - 1)  # one after the last block before `num` that lacks its part
            num_skipped = 0 if whole else self.window.num_skipped_blocks(num * self.window.block_size)
            if not last or lacking[last - 1] < num_skipped:
                return num
        return 0

    def check(self, is_held: Sequence[bool], free: Sequence[int]) -> None:
        """Raise AssertionError unless used and unused parts are held and present, and there is memory for all of
        them."""
        assert self.num_used == sum(map(bool, self._num_users)) and self.num_present == sum(self._is_present)
        for block_id, num_users in enumerate(self._num_users):
            assert num_users >= 0 and (not num_users or is_held[block_id]), f"part {block_id} is used, not held"
            is_unused = bool(self._is_present[block_id]) and is_held[block_id] and not num_users
            assert is_unused == (block_id in self._unused) and (not num_users or self._is_present[block_id]), (
                f"part {block_id}"
            )
        assert 0 <= self.num_warm <= len(free)
        assert not any(self._is_present[block_id] for block_id in free[: len(free) - self.num_warm])
        assert self.has_room(free, 0), "more is there than there is memory for"

    def check_users(self, users: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless each part has exactly the users that name its block."""
        expected = [0] * self.num_ids
        for block_ids in users:
            for block_id in block_ids:
                expected[block_id] += 1
        wrong = [block_id for block_id, num in enumerate(expected) if num != self._num_users[block_id]]
        assert not wrong, f"parts {wrong}: counted {[self._num_users[each] for each in wrong]}, not as named"
