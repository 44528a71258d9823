"""Keep the local prefix cache: sealed units of KV, named by the hash of their last span.

The ledger counts the blocks. This module keeps names, the order of eviction, and the changes since the last report to
the index.

    unit = max(64, block_size) tokens: whole spans in whole blocks

    token_ids   |--- unit 0 ---|--- unit 1 ---|--- unit 2 ---|- tail -|
    spans       |  s0          |  s1          |  s2          |  none      (block_size <= 64)
    named by       s0             s1             s2                       a child is found only through its parents

    least recent ─► [unit 2 of A][unit 1 of A][unit 0 of A][unit 1 of B] ─► most recent
                     evicted first: a chain goes from its end, so what remains can still be found
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import count

from baton.engine.kv.window import ALL, Window
from kvtransfer.naming import SPAN_TOKENS


class Unit:
    """The sealed blocks of one unit. Only the cache holds its idle blocks."""

    __slots__ = ("spans", "block_ids", "num_idle", "idle_since")

    def __init__(self, spans: tuple[bytes, ...], block_ids: tuple[int, ...]):
        self.spans = spans
        self.block_ids = block_ids
        self.num_idle = 0
        self.idle_since = 0  # when its last block became idle, by PrefixCache.now


class PrefixCache:
    """Names and eviction order of cached units. Not thread-safe: the ledger calls it under its lock."""

    def __init__(self, block_size: int):
        self.unit_tokens = max(SPAN_TOKENS, block_size)
        self.spans_per_unit = self.unit_tokens // SPAN_TOKENS
        self.blocks_per_unit = self.unit_tokens // block_size
        self._units: dict[bytes, Unit] = {}
        self._unit_of: dict[int, Unit] = {}
        self._idle: OrderedDict[bytes, Unit] = OrderedDict()  # least recently used first
        self._clock = count()
        self._num_units: dict[bytes, int] = {}  # units with a span: several units of two spans may have the same first
        # one
        # Net changes since the last drain: never more than what was reported plus what is here, so no bound is needed.
        self._sealed: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._units)

    def now(self) -> int:
        """Return a counter that grows with every call: the cache's clock."""
        return next(self._clock)

    @property
    def oldest(self) -> float:
        """When the least recently used unit with an idle block became idle, by `now`."""
        return next((unit.idle_since for unit in self._idle.values()), float("inf"))

    def find(self, span_hashes: Sequence[bytes], num_tokens: int, window: Window = ALL) -> list[int]:
        """Return the blocks of the longest cached prefix of at most `num_tokens` - 1 tokens: the last is always
        computed.

        Blocks outside the `window` of the next token need not be cached; the first block inside fills their places.
        """
        names = span_hashes[self.spans_per_unit - 1 :: self.spans_per_unit]
        most = min((num_tokens - 1) // self.unit_tokens, len(names))
        if window.num_positions is None:
            num_units = next((index for index in range(most) if names[index] not in self._units), most)
            first = 0
        else:
            num_units, first = self._find_inside(names, most, window)
        block_ids = [block_id for name in names[first:num_units] for block_id in self._units[name].block_ids]
        num_before = first * self.blocks_per_unit
        num_skipped = window.num_skipped_blocks(num_units * self.unit_tokens)
        inside = block_ids[num_skipped - num_before :]
        return inside[:1] * num_skipped + inside

    def _find_inside(self, names: Sequence[bytes], most: int, window: Window) -> tuple[int, int]:
        """Return the largest number of units, up to `most`, whose window is cached, and the first unit inside it."""
        num_units = index = most
        while index > (first := window.num_skipped_blocks(num_units * self.unit_tokens) // self.blocks_per_unit):
            index -= 1
            if names[index] not in self._units:
                num_units = index
        return num_units, first

    def get(self, span: bytes) -> tuple[int, ...]:
        """Return the blocks of the unit that a span names, or () if there is none."""
        unit = self._units.get(span)
        return () if unit is None else unit.block_ids

    def has_blocks(self, block_ids: Sequence[int]) -> bool:
        """Return whether any of these blocks belongs to a unit."""
        return any(block_id in self._unit_of for block_id in block_ids)

    def insert(self, spans: tuple[bytes, ...], block_ids: tuple[int, ...]) -> bool:
        """Name a unit. Returns False if the name is taken or one of its blocks belongs to another unit.

        A block may, since choices of a group share the full blocks before their first own token, which may be inside a
        unit.
        """
        if spans[-1] in self._units or self.has_blocks(block_ids):
            return False
        unit = Unit(spans, block_ids)
        self._units[spans[-1]] = unit
        for block_id in block_ids:
            self._unit_of[block_id] = unit
        for span in spans:
            self._num_units[span] = self._num_units.get(span, 0) + 1
            if self._num_units[span] == 1 and self._evicted.pop(span, False) is False:
                self._sealed[span] = None
        return True

    def mark_idle(self, block_id: int) -> None:
        """Note that only the cache holds the block: its unit may be evicted, and is now the most recently used."""
        unit = self._unit_of[block_id]
        unit.num_idle += 1
        unit.idle_since = self.now()
        self._idle[unit.spans[-1]] = unit
        self._idle.move_to_end(unit.spans[-1])

    def mark_busy(self, block_id: int) -> None:
        """Note that a request holds the block again."""
        unit = self._unit_of[block_id]
        unit.num_idle -= 1
        if not unit.num_idle:
            del self._idle[unit.spans[-1]]

    def evict(self) -> tuple[int, ...]:
        """Forget the least recently used unit with an idle block, and return its blocks. KeyError if there is none."""
        name, _ = self._idle.popitem(last=False)
        return self.forget(name)

    def forget(self, name: bytes) -> tuple[int, ...]:
        """Forget the unit with this name, and return its blocks."""
        unit = self._units.pop(name)
        self._idle.pop(name, None)
        for block_id in unit.block_ids:
            del self._unit_of[block_id]
        for span in unit.spans:
            self._num_units[span] -= 1
            if not self._num_units[span]:
                del self._num_units[span]
                if self._sealed.pop(span, False) is False:
                    self._evicted[span] = None
        return unit.block_ids

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return the span hashes (sealed, evicted) since the last call. A span that was sealed and evicted is in
        neither."""
        sealed, evicted = list(self._sealed), list(self._evicted)
        self._sealed, self._evicted = {}, {}
        return sealed, evicted

    def snapshot(self) -> list[bytes]:
        """Return every cached span hash."""
        return list(self._num_units)

    def blocks(self) -> list[int]:
        """Return every cached block id."""
        return list(self._unit_of)

    def check(self, is_idle: Callable[[int], bool]) -> None:
        """Raise AssertionError unless names, blocks and the eviction order agree."""
        assert len(self._unit_of) == len(self._units) * self.blocks_per_unit
        for name, unit in self._units.items():
            assert unit.spans[-1] == name and len(unit.spans) == self.spans_per_unit
            assert all(self._unit_of[block_id] is unit for block_id in unit.block_ids)
            assert unit.num_idle == sum(map(is_idle, unit.block_ids)), f"idle count of unit {name.hex()[:8]}"
            assert (name in self._idle) == (unit.num_idle > 0)
        assert all(self._units.get(name) is unit for name, unit in self._idle.items())
        assert not self._sealed.keys() & self._evicted.keys()
        assert self._num_units == Counter(span for unit in self._units.values() for span in unit.spans)
