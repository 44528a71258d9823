"""Select the sequences of the next step: continuous batching with chunked prefill, two policies one after the other.

    running   decode     one token each, first in order first; out of blocks: the last in order is preempted
    running   prefill    the rest of the step's tokens, in chunks that end on spans except the last
    waiting ──┘          enters in order as far as sequences and blocks allow

The order is priority, then arrival, then choice. A sequence that is preempted gives its blocks back (whole units stay
in the cache) and keeps its token record; it waits in its old place and continues by a prefix hit, recomputing what was
evicted.

The order is among the sequences of one tenant. Tenants take turns to have their prompts read and to enter, and where
one waits that has less than its part of the sequences or blocks, what others have beyond theirs is preempted. No tenant
preempts one that holds less than itself.
"""

import time
from bisect import insort
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import FirstToken
from baton.engine.kv.ledger import Ledger
from baton.engine.schedule.blocks import SequenceBlocks
from baton.engine.schedule.counters import WaitClock
from baton.engine.schedule.groups import StepEligibility, fork
from baton.engine.schedule.output_lengths import OutputLengths
from baton.engine.schedule.sequence import Copies, Sequence
from baton.engine.schedule.tenant_shares import Shares, by_tenant, first_below, last_above, num_blocks
from baton.fairness import RoundRobin
from kvtransfer.layout import KVLayout
from kvtransfer.naming import SPAN_TOKENS

_SHORT_STEPS = 4  # in a chunk while tenants share, for whom a new request waits, or stages do
_SEEN_S = 30.0  # a tenant counts as sharing for this long


class Slice(NamedTuple):
    """Tokens [begin, end) of a sequence, computed in one step; its next token is drawn when they are its last."""

    seq: Sequence
    begin: int
    end: int


def by_order(seq: Sequence) -> tuple[int, int, int]:
    return seq.order_key


class Scheduler:
    """The sequences of the loop. Belongs to the loop's thread; the ledger and the lengths guard themselves."""

    def __init__(
        self, config: EngineConfig, layout: KVLayout, ledger: Ledger, shares: Shares, lengths: OutputLengths,
        copies: Copies,
    ):  # fmt: skip
        self.config = config
        self.layout = layout
        self.ledger = ledger
        self.shares, self.lengths = shares, lengths
        self.copies = copies
        self._blocks = SequenceBlocks(layout, ledger)
        self.wait_clock = WaitClock()
        self.waiting: list[Sequence] = []  # both by order
        self.running: list[Sequence] = []
        assert config.max_model_len is not None, "the config is resolved"
        self._tenants = Counter[bytes]()  # of both, by sequences
        self._eligible = StepEligibility()  # of the step that is chosen
        self._held: dict[bytes, int] = {}  # blocks of each tenant when the step was begun, where there are several
        self._turns = RoundRobin[bytes](SPAN_TOKENS, config.max_model_len)
        self._seen: dict[bytes, float] = {}  # tenants of late, and when one of theirs came: time.monotonic()
        self._short_step = max(1, config.max_num_batched_tokens // _SHORT_STEPS // SPAN_TOKENS) * SPAN_TOKENS

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, seq: Sequence) -> None:
        """A decoding sequence that has its blocks, and its state, joins at once; any other waits its turn."""
        self._tenants[seq.group.tenant] += 1
        now = self._seen[seq.group.tenant] = time.monotonic()
        self._seen = {tenant: at for tenant, at in self._seen.items() if now - at < _SEEN_S}
        has_state = self.ledger.states is None or seq.recurrent.is_ready
        ready = seq.remaining == 1 and seq.block_ids and has_state and len(self.running) < self.config.max_num_seqs
        seq.waits_at_queueing = self.wait_clock.seconds
        insort(self.running if ready else self.waiting, seq, key=by_order)

    def remove(self, seq: Sequence) -> None:
        """Forgets a sequence, if it is here; its blocks are still its own."""
        for queue in (self.running, self.waiting):
            if seq in queue:
                queue.remove(seq)
                self._clear_wait(seq)
                self._tenants -= Counter((seq.group.tenant,))

    def schedule(self, num_stages: int = 1) -> list[Slice]:
        """Return the next step's slices; none when nothing can run. Where `num_stages` compute at a time sequences take
        turns, and chunks beside those that decode are short: these wait for the chunks of all steps."""
        batch: list[Slice] = []
        self._held = by_tenant(self._all, self.shares.stocks[0].num_of) if len(self._tenants) > 1 else {}
        self._make_way()
        with self._choosing(StepEligibility(self.running, (), num_stages if self._may_follow() else 1)):
            self._schedule_decode(batch)
            self._schedule_prefill(batch)
        return batch

    def follow(self, in_flight: list[list[Slice]], num_stages: int = 1) -> list[Slice]:
        """The step behind those `in_flight`, which are being computed; none where it would take blocks from a sequence,
        or where tenants share and a prompt is to be read: both are decided with nothing in flight. With one stage a
        sequence goes on from the token that is being drawn, with more of them others take their turn."""
        if not self._may_follow():
            return []
        batch: list[Slice] = []
        with self._choosing(StepEligibility(self.running, in_flight, num_stages, self.ledger.states is not None)):
            if not self._follow_decode(batch):
                return []
            self._schedule_prefill(batch)
        return batch

    @contextmanager
    def _choosing(self, eligible: StepEligibility) -> Generator[None]:
        self._eligible = eligible
        try:
            yield
        finally:
            self._eligible = StepEligibility()

    def _may_follow(self) -> bool:
        if self.shares.is_short:
            return False
        return len(self._tenants) < 2 or not (self.waiting or any(seq.remaining > 1 for seq in self.running))

    def _follow_decode(self, batch: list[Slice]) -> bool:
        """Return whether there were blocks for all."""
        for seq in filter(self._eligible.may_run, self._by_precedence(self.running)):
            begin = self._eligible.first_uncomputed(seq)
            left = seq.num_tokens - begin
            if left > 1 or not seq.block_ids:
                continue
            if left == 0 and (seq.is_full or not seq.group.prefilled):
                continue  # the token that is being drawn is its last; or it is the first, which the taker has to see
            if begin >= len(seq.block_ids) * self.layout.block_size and not self._blocks.take(seq, 1):
                return False
            batch.append(Slice(seq, begin, begin + 1))
        return True

    def _schedule_decode(self, batch: list[Slice]) -> None:
        block_size = self.layout.block_size
        for seq in filter(self._eligible.may_run, self._by_precedence(self.running)):
            if not seq.block_ids:  # preempted for one before it
                continue
            begin, end = seq.num_computed, min(len(seq.token_ids), seq.num_computed + SPAN_TOKENS)  # the least chunk
            has_room = end <= len(seq.block_ids) * block_size or self._grow(seq, end)
            if has_room and len(seq.token_ids) == begin + 1:
                batch.append(Slice(seq, begin, end))

    def _schedule_prefill(self, batch: list[Slice]) -> None:
        """Add prompts that are being read, then waiting ones, as far as the step has room: a tenant's turn at a time.
        Where tenants share, those who have saved turns have the step to themselves, if any of them can run, and all
        others take short ones, for a request may come meanwhile."""
        budget = self.config.max_num_batched_tokens - len(batch)
        if self._eligible.has_short_chunks:
            budget = min(budget, self._short_step)
        self.wait_clock.look()
        queues: dict[bytes, list[tuple[Sequence, bool]]] = {}
        for seq in filter(self._eligible.may_run, self.running):
            if seq.num_tokens - self._eligible.first_uncomputed(seq) > 1:
                queues.setdefault(seq.group.tenant, []).append((seq, False))
        if not (has_slot := len(self.running) < self.config.max_num_seqs):
            self.wait_clock.note(WaitClock.SLOT)
        for seq in filter(self._eligible.may_enter, self.waiting if has_slot else ()):
            queues.setdefault(seq.group.tenant, []).append((seq, True))
        self._turns.wait(queues)
        if len(self._seen) > 1:
            # They may lack blocks that others hold, and these would never give them back if they never ran.
            if self._schedule_chunks(
                {who: [*queue] for who, queue in queues.items() if self._turns.has_saved(who)}, budget, batch
            ):
                return
            budget = min(budget, self._short_step)
        self._schedule_chunks(queues, budget, batch)

    def _schedule_chunks(
        self, queues: dict[bytes, list[tuple[Sequence, bool]]], budget: int, batch: list[Slice]
    ) -> bool:
        """Adds chunks of sequences, `queues` of them by tenant, each with whether it waits. Whether there was any."""
        if not queues:
            return False
        num_slices, starving, blocked = len(batch), self._starving(), set[bytes]()
        while budget > 0 and (tenant := self._turns.next(queues)) is not None:
            seq, is_new = queues[tenant].pop(0)
            if not queues[tenant]:
                del queues[tenant]
            if is_new:
                is_kept = tenant not in starving and len(self.running) + len(starving) >= self.config.max_num_seqs
                if is_kept or not self._start_waiting(seq, blocked):
                    self.wait_clock.note(WaitClock.BLOCKS if tenant in blocked else WaitClock.SLOT)
                    continue
                starving = self._starving()
            if chunk := self._chunk(seq, budget):
                batch.append(chunk)
                budget -= chunk.end - chunk.begin
                self._turns.charge(tenant, chunk.end - chunk.begin)
            elif is_new:
                break
        return len(batch) > num_slices

    def _start_waiting(self, seq: Sequence, blocked: set[bytes]) -> bool:
        """Move a waiting sequence to the running ones, if there is a slot and all its blocks. Behind one that lacks
        blocks only those of its tenant run that take none from it: they will give theirs back."""
        tenant = seq.group.tenant
        if len(self.running) >= self.config.max_num_seqs:
            return False
        if tenant in blocked and self._blocks.lacks_any(seq):
            return False
        if not self._leaves_owed(seq) or not self._allocate_waiting(seq):
            blocked.add(tenant)
            with self.ledger.lock:
                self.shares.note_wait(seq, self._blocks.lacked(seq))
            return False
        self.waiting.remove(seq)
        self._clear_wait(seq)
        insort(self.running, seq, key=by_order)
        seq.group.note_wait(seq, self.wait_clock.seconds)
        self._turns.charge(tenant, self.lengths.expected_left(seq.group.request, seq.num_output))
        return True

    def _chunk(self, seq: Sequence, budget: int) -> Slice | None:
        """As many of the sequence's tokens as fit, up to a span's end or the sequence's; None when that is none."""
        begin = self._eligible.first_uncomputed(seq)
        end = min(seq.num_tokens, begin + budget)
        missing = self._blocks.num_lacking(seq, end)  # of a window, as it goes
        if missing > 0 and not self._blocks.take(seq, missing):
            end = min(end, len(seq.block_ids) * self.layout.block_size)
        if self.ledger.states is not None:
            end = min(end, seq.next_checkpoint(begin, self.ledger.cache.unit_tokens, self.config.checkpoint_step))
        if end < seq.num_tokens:
            end -= end % SPAN_TOKENS
        return Slice(seq, begin, end) if end > begin else None

    # ---- blocks ----

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        """The blocks of `num_tokens`; preempts the last behind it until there are as many. False: that was `seq`."""
        while (missing := self._blocks.num_lacking(seq, num_tokens)) > 0 and not self._blocks.take(seq, missing):
            victim = self._last(self.waiting, seq) or self._last(self.running, seq) or seq
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def room_for_draft(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of `num_tokens` proposals after its last token a sequence has blocks for. It takes more from
        its promise, or if every other that runs could still grow: no sequence is preempted for a guess."""
        missing = self._blocks.num_lacking(seq, seq.num_tokens + num_tokens)
        if missing > 0:
            unpromised = missing - seq.reserve
            spare = self.ledger.num_available - len(self.running)
            if (unpromised > 0 and unpromised > spare) or not self._blocks.take(seq, missing):
                return min(num_tokens, len(seq.block_ids) * self.layout.block_size - seq.num_tokens)
        return num_tokens

    def _allocate_waiting(self, seq: Sequence) -> bool:
        """All blocks for a waiting sequence. What waits behind it gives way if that is enough, what runs does not."""
        self._extend_prefix(seq)
        missing, precedence = self._blocks.num_to_enter(seq), self._precedence(seq)
        others = (o for o in self.waiting if self._precedence(o) > precedence and not o.group.is_for_taker)
        behind = num_blocks(others, self.ledger.window)
        if not self._fits(seq, missing, behind):
            return False
        while not self._fits(seq, missing):
            victim = self._last(self.waiting, seq)
            if victim is None:
                return False
            self.preempt(victim)
        return self._blocks.take(seq, missing) and self._enter_state(seq)

    def _enter_state(self, seq: Sequence) -> bool:
        """A state block, where the model has such; what waits behind it gives way."""
        while not seq.recurrent.enter(self.ledger.states, seq.group.holder, self.copies.state):
            if (victim := self._last(self.waiting, seq)) is None:
                return False
            self.preempt(victim)
        return True

    def _fits(self, seq: Sequence, missing: int, more: int = 0) -> bool:
        """Return whether `missing` blocks can be taken. Promised ones always can; others must leave one unit to grow
        in, or the next step would preempt again. `more`: blocks that are about to be freed."""
        unpromised = missing - seq.reserve
        margin = self.ledger.cache.blocks_per_unit if self.running else 0
        return unpromised <= 0 or unpromised + margin <= self.ledger.num_available + more

    def _last(self, queue: list[Sequence], seq: Sequence) -> Sequence | None:
        """The last behind `seq` that holds anything; a held prefill is never preempted."""
        precedence = self._precedence(seq)
        for other in reversed(self._by_precedence(queue)):
            if self._precedence(other) <= precedence:
                return None
            if (other.block_ids or other.reserve) and not other.group.is_for_taker:
                return other
        return None

    def _extend_prefix(self, seq: Sequence) -> None:
        """Units that came into the cache since the sequence was admitted, or that are left of it since it was
        preempted."""
        if seq.group.is_for_taker or seq.num_computed != len(seq.block_ids) * self.layout.block_size:
            return
        if not seq.group.reads_cache or seq.recurrent.is_ready:
            return
        seq.extend_prefix(self.ledger, self.layout.block_size)

    def preempt(self, seq: Sequence) -> None:
        """Blocks back, record kept, the same place in the queue."""
        if seq in self.running:
            self.running.remove(seq)
            seq.waits_at_queueing = self.wait_clock.seconds
            insort(self.waiting, seq, key=by_order)
            seq.group.note_preemption()
        seq.give_back(self.ledger)

    # ---- tenants ----

    def _precedence(self, seq: Sequence) -> tuple[int, bytes, tuple[int, int, int]]:
        """Those of a tenant that holds less go first; of one tenant by order."""
        tenant = seq.group.tenant
        return self._held.get(tenant, 0), tenant, seq.order_key

    def _by_precedence(self, queue: list[Sequence]) -> list[Sequence]:
        return sorted(queue, key=self._precedence) if self._held else list(queue)

    @property
    def _all(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def _part(self, num_tenants: int) -> int:
        """Return a tenant's part of the sequences that run."""
        return max(1, self.config.max_num_seqs // num_tenants)

    def _starving(self) -> dict[bytes, Sequence]:
        """The first that waits of each tenant that runs less than its part; none of one that is alone."""
        if len(self._tenants) < 2:
            return {}
        return first_below(self._part(len(self._tenants)), self.running, self.waiting)

    def _make_way(self) -> None:
        """Preempt sequences of tenants above their part, for tenants below theirs that wait here or for admission: a
        slot for each, and the blocks that it lacks. Called before the step is chosen: what is in it stays."""
        if not (self._held or self.shares.is_short):
            return
        with self.ledger.lock:
            owed = self.shares.owed()
        num_tenants, starving = len(self._tenants.keys() | owed), self._starving()
        if not num_tenants:  # who was owed something asks no more, and the loop has nothing
            return
        most, part = self.config.max_num_seqs - len(starving), self._part(num_tenants)
        while len(self.running) > most and (seq := last_above(part, self.running, lambda seq: 1)):
            self.preempt(seq)
        lacked = {tenant: self._blocks.lacked(seq) for tenant, seq in starving.items()}
        for index, (ledger, num_of, margin) in enumerate(self.shares.stocks):
            part, held = max(1, ledger.num_blocks // num_tenants), by_tenant(self._all, num_of)
            num = sum(amounts[index] for amounts in owed.values())
            num += sum(more[index] + margin for who, more in lacked.items() if 0 < more[index] <= part - held[who])
            while num > ledger.num_available and (seq := last_above(part, self._all, num_of)):
                self.preempt(seq)

    def _leaves_owed(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence may take what it lacks beside what others are owed. If not, what its tenant
        has waiting like it holds nothing: these could go on no more than it, and their blocks may be all that is
        owed."""
        if not self.shares.is_short:
            return True
        with self.ledger.lock:
            may_take = self.shares.may_take(seq.group.tenant, self._blocks.lacked(seq))
        for other in () if may_take else self.waiting:
            if other.group.tenant == seq.group.tenant and self._blocks.lacks_any(other):
                self.preempt(other)
        return may_take

    def _clear_wait(self, seq: Sequence) -> None:
        with self.ledger.lock:
            self.shares.clear_wait(seq)

    # ---- choices ----

    def fork(self, trunk: Sequence, first_tokens: list[FirstToken]) -> None:
        """Fork the prompt into its live choices (at least one), each with its first token. A choice that finds no block
        for its tail starts preempted."""
        for seq in fork(trunk, first_tokens, self.ledger, self.layout.block_size, self.copies):
            self.add(seq)
