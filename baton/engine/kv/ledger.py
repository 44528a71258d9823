"""Count the holders of each block of the pool. Every block counts once, under its strongest holder:

    quarantined  >  fetching  >  leased  >  running  >  cached  >  free
    a cancelled     bytes land   a taker    sequences   the        none
    fetch's, until  in it        reads it   use it      prefix
    no byte can                                         cache
    land any more

    quarantined + fetching + leased + running + cached + free == num_ids               always
    reserved (promised, not yet taken) <= cached + free                                always

There are as many block ids as whole blocks, except when only some layers have a window. Then skipped blocks give up a
part (window_parts.py), and there are more ids than memory for whole blocks; promises and available blocks are counted
in whole blocks.

               allocate                  seal                    release
        free ───────────► running ───────────────► running+cached ───────► cached ──► free (evicted, oldest first)
          └─────────────► fetching ── verified ──►    ▲
                             └── cancelled ──► quarantined ── settled ──► free

A block may have many holders: several sequences, a lease, the cache. Each becomes one with `allocate` or `share` and
ceases to be one with `release`. The step gate: a block that a step may write is held `running` or `leased` by a
sequence of the loop, and only the loop releases it, between steps. So a block that a launched step may touch is never
free for a fetch.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

from baton.engine.kv.prefix import PrefixCache
from baton.engine.kv.window import ALL, Window
from baton.engine.kv.window_parts import WindowParts
from kvtransfer.layout import BlockRef
from kvtransfer.naming import SPAN_TOKENS


class Holder(IntEnum):
    """Who holds a block; a higher value is a stronger holder."""

    FREE = 0
    CACHED = 1
    RUNNING = 2
    LEASED = 3
    FETCHING = 4
    QUARANTINED = 5


# A block's holders are one integer, a 20-bit count each, the strongest in the highest bits: comparing the integer with
# the weights finds the strongest holder.
_BITS = 20
_WEIGHT = (0, *(1 << _BITS * (holder - 1) for holder in range(1, 6)))
_THRESHOLDS = _WEIGHT[1:]
_COUNT_MASK = (1 << _BITS) - 1


class LedgerError(RuntimeError):
    """A holder released a block that it does not hold: always a bug."""


class Ledger:
    """Counts the holders of one pool's blocks. Thread-safe: every method takes the re-entrant `lock`.

    Callers take `lock` too, to make several calls one. A call takes about a microsecond for each block that it names,
    more if it gives pages back.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_states: int = 0, window: Window = ALL, lock: Any = None,
        parts: WindowParts | None = None,
    ):  # fmt: skip
        """Make a ledger of free blocks.

        `num_states`: blocks for the recurrent states of sequences, in a ledger of their own under the same lock. In its
        cache a checkpoint is named by the span after which the state stood. `parts`: given when only some layers have a
        `window`.
        """
        self.lock = lock or threading.RLock()
        self.states = Ledger(num_states, SPAN_TOKENS, lock=self.lock) if num_states else None
        self.num_blocks, self.window, self.parts = num_blocks, window, parts
        self.num_ids = num_ids = num_blocks if parts is None else parts.num_ids
        self.cache = PrefixCache(block_size)
        self._holders = [0] * num_ids
        self._generations = [0] * num_ids
        self._free = list(range(num_ids - 1, -1, -1))  # a stack: recently used memory is warm
        self._counts = [num_ids, 0, 0, 0, 0, 0]
        self._reserved = 0

    # ---- counts ----

    @property
    def num_available(self) -> int:
        """The blocks that may still be promised or allocated: free or only cached, less those reserved."""
        return self.num_left - self._reserved

    @property
    def num_left(self) -> int:
        """The blocks that are free or only cached, in whole blocks that there is memory for."""
        num_idle = self._counts[Holder.FREE] + self._counts[Holder.CACHED]
        return num_idle if self.parts is None else self._bytes_left // self.window.block_bytes

    @property
    def _bytes_left(self) -> int:
        assert self.parts is not None
        num_held = self.num_ids - self._counts[Holder.FREE] - self._counts[Holder.CACHED]
        return self.parts.num_bytes - self.parts.bytes_of(num_held, self.parts.num_used)

    @property
    def num_reserved(self) -> int:
        return self._reserved

    def counts(self) -> dict[str, int]:
        """Return the number of blocks by strongest holder, strongest first."""
        with self.lock:
            return {holder.name.lower(): self._counts[holder] for holder in reversed(Holder)}

    def usage(self) -> dict[str, int]:
        """Return `counts` in whole blocks that there is memory for; a skipped block counts by what stays of it."""
        with self.lock:
            found = self.counts()
            if self.parts is None:
                return found
            num_parts = min(found["cached"], self.parts.num_present - self.parts.num_used)
            num_cached = self.parts.bytes_of(found["cached"], num_parts) // self.window.block_bytes
            found["cached"] = min(num_cached, self.num_left)
            found["free"] = self.num_left - found["cached"]
            found["running"] = 0  # leased, fetching and quarantined blocks are whole
            found["running"] = self.num_blocks - sum(found.values())
            return found

    def generation(self, block_id: int) -> int:
        """Return how often the block was allocated: readers of an older generation are stale."""
        return self._generations[block_id]

    def refs(self, block_ids: Iterable[int]) -> tuple[BlockRef, ...]:
        """Return the blocks with their present generations."""
        return tuple(BlockRef(block_id, self._generations[block_id]) for block_id in block_ids)

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Return how many of these only the cache holds; sharing them lowers `num_available` by as many."""
        return sum(self._holders[block_id] == _WEIGHT[Holder.CACHED] for block_id in block_ids)

    # ---- promises ----

    def reserve(self, num: int) -> bool:
        """Promise `num` blocks without choosing them. Returns False if fewer are available."""
        with self.lock:
            if num > self.num_available:
                return False
            self._reserved += num
            return True

    def unreserve(self, num: int) -> None:
        """Take back a promise of `num` blocks. Raises LedgerError if fewer are promised."""
        with self.lock:
            if not 0 <= num <= self._reserved:
                raise LedgerError(f"unreserve {num} of {self._reserved} reserved blocks")
            self._reserved -= num

    # ---- blocks ----

    def allocate(self, num: int, holder: Holder, reserved: int = 0) -> list[int] | None:
        """Allocate `num` blocks to `holder`, `reserved` (<= num) of them from an earlier promise; None if too few are
        available.

        Free blocks are taken first, then the least recently used of the cache. Increments each block's generation.
        """
        with self.lock:
            if num - reserved > self.num_available:
                return None
            self.unreserve(reserved)
            self._make_room(num)
            block_ids = [self._free.pop() for _ in range(num)]
            for block_id in block_ids:
                self._generations[block_id] += 1
                self._holders[block_id] = _WEIGHT[holder]
            self._counts[Holder.FREE] -= num
            self._counts[holder] += num
            if self.parts is not None:
                self.parts.note_allocated(block_ids)
            return block_ids

    def share(self, block_ids: Sequence[int], holder: Holder, num_partial: int = 0) -> bool:
        """Add a holder to blocks that have one. The holder does not use the parts of the first `num_partial` blocks.

        Returns False if only the cache holds them and all such blocks are promised. Raises LedgerError for a free
        block.
        """
        with self.lock:
            if not self._may_share(block_ids, num_partial):
                return False
            weight = _WEIGHT[holder]
            for block_id in block_ids:
                if not self._holders[block_id]:
                    raise LedgerError(f"share of free block {block_id}")
                self._add(block_id, weight)
            if self.parts is not None:
                self.parts.use(block_ids[num_partial:])
                self.parts.on_held(block_ids[:num_partial], self.cache.now())
            return True

    def release_skipped(self, block_ids: Sequence[int], holder: Holder) -> None:
        """Release blocks that are outside a holder's window, or only their parts if skipped blocks stay."""
        with self.lock:
            if self.parts is None:
                self.release(block_ids, holder)
            else:
                self.parts.release(block_ids, self.cache.now())

    def release(self, block_ids: Sequence[int], holder: Holder, num_partial: int = 0) -> None:
        """Remove a holder from blocks that it holds, in reverse order, so that the end of a chain is evicted first.

        The parts of the first `num_partial` blocks were released before. Raises LedgerError for a block that it does
        not hold.
        """
        with self.lock:
            if self.parts is not None:
                self.parts.release(block_ids[num_partial:], self.cache.now())
            for block_id in reversed(block_ids):
                self._expect(block_id, holder)
                self._add(block_id, -_WEIGHT[holder])

    def move(self, block_ids: Sequence[int], source: Holder, target: Holder) -> None:
        """Replace one holder of these blocks by another. Raises LedgerError for a block that `source` does not hold."""
        with self.lock:
            step = _WEIGHT[target] - _WEIGHT[source]
            for block_id in block_ids:
                self._expect(block_id, source)
                self._add(block_id, step)

    # ---- prefix cache ----

    def find(self, span_hashes: Sequence[bytes], num_tokens: int, whole: bool = False) -> list[int]:
        """Return the blocks of the longest cached prefix, at most `num_tokens` - 1 tokens, without becoming a holder.

        If sequences have a state, the prefix also has a checkpoint. Unless `whole`, blocks outside the window of the
        next token need not be cached; the first block inside fills their places.
        """
        with self.lock:
            if self.parts is not None:
                found = self.cache.find(span_hashes, num_tokens)
                return found[: self.parts.num_usable(found, self.cache.blocks_per_unit, whole)]
            found = self.cache.find(span_hashes, num_tokens, ALL if whole else self.window)
            if self.states is None:
                return found
            for num_units in range(len(found) // self.cache.blocks_per_unit, 0, -1):
                if self.checkpoint(span_hashes, num_units * self.cache.unit_tokens) is not None:
                    return found[: num_units * self.cache.blocks_per_unit]
            return []

    def checkpoint(self, span_hashes: Sequence[bytes], num_tokens: int) -> int | None:
        """Return the cached state block after the first `num_tokens` tokens (whole spans), or None. Adds no holder."""
        if self.states is None or not num_tokens:
            return None
        with self.lock:
            found = self.states.cache.get(span_hashes[num_tokens // SPAN_TOKENS - 1])
            return found[0] if found else None

    def seal(self, spans: tuple[bytes, ...], block_ids: tuple[int, ...]) -> bool:
        """Name the blocks of one unit in the cache, once they are written and verified.

        Returns False if the name is taken: then these blocks stay private, unless they have parts which the named ones
        lack. Raises LedgerError for blocks without a holder.
        """
        with self.lock:
            if any(self._holders[block_id] < _WEIGHT[Holder.RUNNING] for block_id in block_ids):
                raise LedgerError(f"seal of blocks {block_ids} that have no holder")
            if self._is_better(spans[-1], block_ids):
                self._unname(self.cache.forget(spans[-1]))
            if not self.cache.insert(spans, block_ids):
                return False
            for block_id in block_ids:
                self._holders[block_id] += _WEIGHT[Holder.CACHED]
            return True

    def block_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return the span hashes (sealed, evicted) since the last call."""
        with self.lock:
            return self.cache.drain_events()

    def snapshot(self) -> list[bytes]:
        """Return all cached span hashes."""
        with self.lock:
            return self.cache.snapshot()

    # ---- integrity ----

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts, holders, free list, cache and promises agree."""
        with self.lock:
            counts = [0] * len(Holder)
            for word in self._holders:
                counts[bisect_right(_THRESHOLDS, word)] += 1
            assert counts == self._counts, f"counted {counts}, kept {self._counts}"
            assert sum(self._counts) == self.num_ids
            assert 0 <= self._reserved <= self.num_left, f"{self._reserved} reserved of {self.num_left}"
            if self.parts is not None:
                is_held = [word > _COUNT_MASK for word in self._holders]
                self.parts.check(is_held, self._free)
            assert sorted(self._free) == [block_id for block_id, word in enumerate(self._holders) if not word]
            cached = {block_id for block_id, word in enumerate(self._holders) if word & _COUNT_MASK}
            assert cached == set(self.cache.blocks()), "cached blocks without a name, or names without blocks"
            assert all(word & _COUNT_MASK <= 1 for word in self._holders)
            self.cache.check(lambda block_id: self._holders[block_id] == _WEIGHT[Holder.CACHED])
            if self.states is not None:
                self.states.check_integrity()

    def check_holders(
        self, holdings: Iterable[tuple[Holder, Sequence[int]]], part_users: Iterable[Sequence[int]] = ()
    ) -> None:
        """Raise AssertionError unless the holders counted (without the cache) and the users of parts are exactly
        these."""
        with self.lock:
            if self.parts is not None:
                self.parts.check_users(part_users)
            expected = [0] * self.num_ids
            for holder, block_ids in holdings:
                for block_id in block_ids:
                    expected[block_id] += _WEIGHT[holder]
            for block_id, word in enumerate(self._holders):
                held = word & ~_COUNT_MASK
                assert held == expected[block_id], f"block {block_id}: counted {held:x}, held {expected[block_id]:x}"

    # ---- room ----

    def _make_room(self, num: int) -> None:
        """Evict from the cache until `num` blocks are free and there is memory to make them whole.

        Pages of other free blocks go first, then the least recently used parts and units.
        """
        while len(self._free) < num:
            self._unname(self.cache.evict())
        if self.parts is None:
            return
        while not self.parts.has_room(self._free, num):
            if self.parts.num_warm > num:
                self.parts.give_back_free(self._free)
            elif self.parts.oldest < self.cache.oldest:
                self.parts.drop_oldest()
            else:
                self._unname(self.cache.evict())

    def _may_share(self, block_ids: Sequence[int], num_partial: int) -> bool:
        if self.parts is None:
            return self.num_idle(block_ids) <= self.num_available
        num_bytes = self.parts.bytes_of(self.num_idle(block_ids), self.parts.num_unused(block_ids[num_partial:]))
        return num_bytes <= self._bytes_left - self._reserved * self.window.block_bytes

    def _is_better(self, name: bytes, block_ids: Sequence[int]) -> bool:
        """Return whether these blocks should take over a name: all their parts are present, and the named ones lack
        some."""
        if self.parts is None or not (cached := self.cache.get(name)) or self.cache.has_blocks(block_ids):
            return False
        return self.parts.are_present(block_ids) and not self.parts.are_present(cached)

    def _unname(self, block_ids: Sequence[int]) -> None:
        """Remove the cache as holder of a unit that it has forgotten."""
        for block_id in block_ids:
            self._add(block_id, -_WEIGHT[Holder.CACHED], evicted=True)

    # ---- one block ----

    def _expect(self, block_id: int, holder: Holder) -> None:
        if not self._holders[block_id] >> _BITS * (holder - 1) & _COUNT_MASK:
            raise LedgerError(f"block {block_id} has no {holder.name.lower()} holder to give back")

    def _add(self, block_id: int, step: int, evicted: bool = False) -> None:
        """Add `step` to a block's holders, and update the counts, the free list and the cache's idle blocks."""
        old = self._holders[block_id]
        new = self._holders[block_id] = old + step
        before, after = bisect_right(_THRESHOLDS, old), bisect_right(_THRESHOLDS, new)
        if before == after:
            return
        self._counts[before] -= 1
        self._counts[after] += 1
        if after == Holder.FREE:
            self._free.append(block_id)
            if self.parts is not None:
                self.parts.on_freed(block_id)
        elif after == Holder.CACHED:
            self.cache.mark_idle(block_id)
            if self.parts is not None:
                self.parts.on_cached(block_id)
        elif before == Holder.CACHED and not evicted:
            self.cache.mark_busy(block_id)
