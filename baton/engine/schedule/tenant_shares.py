"""Count what each tenant of one engine holds, and bound what it may take.

A lone tenant may have everything. When a tenant with less than its part finds no room, it is owed the blocks that it
lacks: sequences of tenants above their part are preempted for it (scheduler.py), and while it asks, no tenant above its
part takes those blocks. New requests do not overtake a sequence of their tenant that waits in the loop for blocks: they
leave what it lacks.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Key, Request
from baton.engine.kv.ledger import Ledger
from baton.engine.kv.window import Window
from baton.engine.schedule.sequence import Sequence, SequenceGroup
from baton.engine.schedule.states import GroupState
from baton.fairness import has_room
from kvtransfer.layout import KVLayout

_OWED_S = 0.5  # a refused request is owed blocks for this long; gateways ask again within 20 ms
_SPARE_SHARE = 8  # one in this many blocks, and at most one context's, is kept for a tenant that may come


def num_blocks(seqs: Iterable[Sequence], window: Window) -> int:
    """Return how many blocks the sequences hold or are promised."""
    return sum(seq.blocks.num_held(window) + seq.blocks.reserve for seq in seqs)


class Amounts(NamedTuple):
    """A number of KV blocks and of state blocks (0 if the model's layers keep no state)."""

    blocks: int = 0
    states: int = 0

    def plus(self, other: "Amounts") -> "Amounts":
        return Amounts(self.blocks + other.blocks, self.states + other.states)

    def minus(self, other: "Amounts") -> "Amounts":
        return Amounts(self.blocks - other.blocks, self.states - other.states)


class Wait(NamedTuple):
    """The first sequence of a tenant that waits in the loop for blocks, and what it lacks."""

    seq: Sequence
    lacked: Amounts  # with the margin that must stay free
    whole: Amounts  # all that it will have then, with the margin


class Shortage(NamedTuple):
    """What a refused request of a tenant lacks, owed until `until` (time.monotonic())."""

    lacked: Amounts
    until: float
    awaited: Sequence | None  # a waiting sequence of the tenant that is served first


class Stock(NamedTuple):
    """Blocks of one kind (KV or states) that tenants share."""

    ledger: Ledger
    num_of: Callable[[Sequence], int]  # blocks that a sequence has or is promised
    margin: int  # blocks that stay free when a sequence enters, for running ones to grow in


def by_tenant(seqs: Iterable[Sequence], num_of: Callable[[Sequence], int]) -> Counter[bytes]:
    """Return the sum of `num_of` over each tenant's sequences."""
    found = Counter[bytes]()
    for seq in seqs:
        found[seq.group.tenant] += num_of(seq)
    return found


def last_above(part: int, seqs: Collection[Sequence], num_of: Callable[[Sequence], int]) -> Sequence | None:
    """Return a sequence to preempt: the last in order of the tenant with most, if that has more than `part`, or None.

    Sequences that hold nothing, and held prefills, are not considered.
    """
    tenant, amount = max(by_tenant(seqs, num_of).items(), key=lambda entry: entry[1], default=(b"", 0))
    theirs = [seq for seq in seqs if seq.group.tenant == tenant and num_of(seq) and not seq.group.is_for_taker]
    return max(theirs, key=lambda seq: seq.order_key) if amount > part and theirs else None


def first_below(part: int, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> dict[bytes, Sequence]:
    """Return the first waiting sequence of each tenant that runs fewer than `part`."""
    found: dict[bytes, Sequence] = {}
    num_running = by_tenant(running, lambda seq: 1)
    for seq in waiting:
        if num_running[seq.group.tenant] < part:
            found.setdefault(seq.group.tenant, seq)
    return found


class Shares:
    """What tenants hold, wait for and are owed. Guarded by the ledger's lock."""

    def __init__(self, config: EngineConfig, layout: KVLayout, ledger: Ledger, groups: Mapping[Key, SequenceGroup]):
        self._groups = groups
        self._layout, self._ledger = layout, ledger
        self._spare = min(layout.num_blocks(config.max_model_len), ledger.num_blocks // _SPARE_SHARE)
        self._owed: dict[bytes, Shortage] = {}  # by tenant
        self._waits: dict[bytes, Wait] = {}  # by tenant
        self.stocks = [Stock(ledger, lambda seq: num_blocks([seq], ledger.window), ledger.cache.blocks_per_unit)]
        if ledger.states is not None:
            self.stocks.append(Stock(ledger.states, lambda seq: seq.recurrent.num_own, 0))

    def num_to_enter(self, seq: Sequence) -> int:
        """Return how many blocks a waiting sequence needs before it may run."""
        return self._ledger.window.max_blocks(seq.blocks.num_lacking(seq.num_tokens, self._layout))

    def lacked(self, seq: Sequence) -> Amounts:
        """Return the blocks and states that a waiting sequence needs beyond its promise."""
        has_state = self._ledger.states is None or seq.recurrent.num_own > 0
        return Amounts(self.num_to_enter(seq) - seq.blocks.reserve, int(not has_state))

    def has_choices(self, request: Request, most: int, num_taken: int) -> bool:
        """Return whether a request's choices may be admitted when `num_taken` of `most` are."""
        own = Counter[bytes]()
        if num_taken + request.sampling.n > most:
            for group in self._groups.values():
                if not group.is_for_taker and group.state is not GroupState.PARKED:
                    own[group.tenant] += group.request.sampling.n
        return self._has_room(request, most, num_taken, own, request.sampling.n)

    def has_waiting(self, request: Request, most: int, num_taken: int, num_tokens: int) -> bool:
        """Return whether `num_tokens` of a request's prompt may wait when `num_taken` of `most` do."""
        own = Counter[bytes]()
        if num_taken + num_tokens > most:
            for group in self._groups.values():
                if group.num_waiting_tokens:
                    own[group.tenant] += group.num_waiting_tokens
        return self._has_room(request, most, num_taken, own, num_tokens)

    def has_blocks(self, request: Request, more: Amounts) -> bool:
        """Return whether a new request may take `more`.

        It must leave what a sequence of its tenant that waits before it lacks. Beyond its tenant's part it must also
        leave what others are owed, and some spare blocks.
        """
        tenant = request.tenant_mark
        if not self._leaves(self._awaited_before(request), more):
            return False
        left = self._owed_beside(tenant).plus(Amounts(self._spare if tenant else 0))
        return self._leaves(left, more) or self._is_part(tenant, more)

    def may_take(self, seq: Sequence) -> bool:
        """Return whether a sequence that waits in the loop may take what it lacks, cached blocks included.

        It must leave what others are owed unless its tenant stays within its part; here even a tenant's first
        sequence must.
        """
        tenant, more = seq.group.tenant, self.lacked(seq)
        if self._leaves(self._owed_beside(tenant), more):
            return True
        held = self._held()
        return self._is_within(held, tenant, more, len(held[0].keys() | self._owed))

    def note_wait(self, seq: Sequence) -> None:
        """Note what the first waiting sequence of its tenant lacks, until `clear_wait`."""
        found = zip(self.stocks, self.lacked(seq), strict=False)
        lacked = Amounts(*(num + stock.margin if num > 0 else 0 for stock, num in found))
        has = Amounts(*(stock.num_of(seq) for stock in self.stocks))
        self._waits[seq.group.tenant] = Wait(seq, lacked, has.plus(lacked))

    def clear_wait(self, seq: Sequence) -> None:
        """Forget the wait of a sequence, if it was noted."""
        if (wait := self._waits.get(seq.group.tenant)) is not None and wait.seq is seq:
            del self._waits[seq.group.tenant]

    def note_shortage(self, request: Request, lacked: Amounts) -> bool:
        """Note what a refused request lacks. Returns whether its tenant is owed that."""
        tenant, before = request.tenant_mark, self._awaited_before(request)
        if not self._is_part(tenant, lacked.plus(before)):
            return False
        awaited = self._waits[tenant].seq if any(before) else None
        self._owed[tenant] = Shortage(lacked, time.monotonic() + _OWED_S, awaited)
        return True

    def clear_shortage(self, request: Request) -> None:
        """Forget what the request's tenant was owed: it has got it."""
        self._owed.pop(request.tenant_mark, None)

    @property
    def is_short(self) -> bool:
        """Return whether a tenant may be owed anything."""
        return bool(self._owed)

    @property
    def available(self) -> Amounts:
        """Return what may still be promised or allocated."""
        return Amounts(*(stock.ledger.num_available for stock in self.stocks))

    def owed(self) -> dict[bytes, Amounts]:
        """Return what each tenant is owed now."""
        if self._owed:
            now = time.monotonic()
            self._owed = {tenant: owed for tenant, owed in self._owed.items() if owed.until > now}
        return {tenant: owed.lacked.plus(self._lacked_by(tenant, owed.awaited)) for tenant, owed in self._owed.items()}

    def _lacked_by(self, tenant: bytes, awaited: Sequence | None) -> Amounts:
        """Return what the awaited sequence lacks, or nothing if it no longer waits."""
        wait = self._waits.get(tenant)
        return wait.lacked if wait is not None and wait.seq is awaited else Amounts()

    def _has_room(self, request: Request, most: int, num_taken: int, own: Counter[bytes], num: int) -> bool:
        """Return whether a request may take `num` more. A tenant that has nothing here may have one request of any
        size."""
        mine = own[request.tenant_mark]
        return not mine or has_room(most, num_taken, mine, num, len(own))

    def _owed_beside(self, tenant: bytes) -> Amounts:
        """Return what tenants other than `tenant` are owed."""
        others = [lacked for other, lacked in self.owed().items() if other != tenant]
        return Amounts(sum(lacked.blocks for lacked in others), sum(lacked.states for lacked in others))

    def _awaited_before(self, request: Request) -> Amounts:
        """Return what a waiting sequence of the request's tenant lacks, if it comes first in order.

        Nothing is kept for a sequence larger than its tenant's part: it has to wait until others end.
        """
        wait = self._waits.get(request.tenant_mark)
        if wait is None or wait.seq.group.request.priority < request.priority:
            return Amounts()
        num_sharing, num_blocks = len(self._held()[0]), [stock.ledger.num_blocks for stock in self.stocks]
        is_part = all(min(num, most) * num_sharing <= most for most, num in zip(num_blocks, wait.whole, strict=False))
        return wait.lacked if is_part else Amounts()

    def _leaves(self, left: Amounts, more: Amounts) -> bool:
        """Return whether taking `more` leaves `left` available, of each kind.

        A kind of which nothing is to be left, or nothing is taken, is not checked.
        """
        return all(
            not kept or num <= 0 or stock.ledger.num_available >= num + kept
            for stock, kept, num in zip(self.stocks, left, more, strict=False)
        )

    def _held(self) -> list[Counter[bytes]]:
        """Return what each tenant has of each kind. Parked requests do not count."""
        groups = [group for group in self._groups.values() if group.state is not GroupState.PARKED]
        seqs = [seq for group in groups for seq in group.live]
        return [by_tenant(seqs, stock.num_of) for stock in self.stocks]

    def _is_within(self, held: list[Counter[bytes]], tenant: bytes, more: Amounts, num_sharing: int) -> bool:
        """Return whether a tenant that takes `more` stays within its part of each kind."""
        return all(
            (had[tenant] + num) * num_sharing <= stock.ledger.num_blocks
            for stock, had, num in zip(self.stocks, held, more, strict=False)
        )

    def _is_part(self, tenant: bytes, more: Amounts) -> bool:
        """Return whether a tenant that takes `more` stays within its part; a lone tenant counts as one of two.

        The first request of a tenant always does, whatever its size.
        """
        held = self._held()
        return not held[0][tenant] or self._is_within(held, tenant, more, max(2, len(held[0])))
