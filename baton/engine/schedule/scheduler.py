"""Select the sequences of the next step: continuous batching with chunked prefill, decode first.

    running   decode     one token each, in order; if blocks run out, the last in order is preempted
    running   prefill    the rest of the step's tokens, in chunks that end on spans except the last
    waiting ──┘          enters in order as far as sequences and blocks allow

The order is priority, then arrival, then choice. A preempted sequence releases its blocks (whole units stay in the
cache) and keeps its tokens. It waits in its old position and continues from the cached prefix, recomputing what was
evicted.

This order holds among the sequences of one tenant. Tenants take turns to compute prompts and to enter. When a tenant
waits that has less than its part of the sequences or blocks, sequences of tenants above their part are preempted. No
tenant preempts one that holds less than itself.
"""

import time
from bisect import insort
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import FirstToken
from baton.engine.kv.ledger import Ledger
from baton.engine.schedule.counters import OutputLengths, WaitClock
from baton.engine.schedule.sequence import Copies, Sequence
from baton.engine.schedule.steps import Slice, StepEligibility
from baton.engine.schedule.tenant_shares import Shares, by_tenant, first_below, last_above, num_blocks
from baton.fairness import RoundRobin
from kvtransfer.layout import KVLayout
from kvtransfer.naming import SPAN_TOKENS

_SHORT_STEPS = 4  # chunks to a full step while tenants or pipeline stages share it, so that none waits long for another
_RECENT_S = 30.0  # a tenant counts as sharing for this long after its last request


def by_order(seq: Sequence) -> tuple[int, int, int]:
    return seq.order_key


class Scheduler:
    """Choose the slices of each step. Belongs to the loop's thread; the ledger has its own lock."""

    def __init__(
        self, config: EngineConfig, layout: KVLayout, ledger: Ledger, shares: Shares, lengths: OutputLengths,
        copies: Copies,
    ):  # fmt: skip
        self.config = config
        self.layout = layout
        self.ledger = ledger
        self.shares, self.lengths = shares, lengths
        self.copies = copies
        self.wait_clock = WaitClock()
        self.waiting: list[Sequence] = []  # both by order
        self.running: list[Sequence] = []
        assert config.max_model_len is not None, "the config is resolved"
        self._tenants = Counter[bytes]()  # their sequences, running and waiting
        self._eligible = StepEligibility()  # for the step being chosen
        self._held: dict[bytes, int] = {}  # blocks of each tenant at the beginning of the step; empty for a lone tenant
        self._turns = RoundRobin[bytes](SPAN_TOKENS, config.max_model_len)
        self._recent: dict[
            bytes, float
        ] = {}  # recent tenants, and when their last sequence was added: time.monotonic()
        self._short_step = max(1, config.max_num_batched_tokens // _SHORT_STEPS // SPAN_TOKENS) * SPAN_TOKENS

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, seq: Sequence) -> None:
        """Add a sequence: to the running ones if it decodes and has its blocks and state, otherwise to the waiting
        ones."""
        self._tenants[seq.group.tenant] += 1
        now = self._recent[seq.group.tenant] = time.monotonic()
        self._recent = {tenant: at for tenant, at in self._recent.items() if now - at < _RECENT_S}
        has_state = self.ledger.states is None or seq.recurrent.is_ready
        ready = seq.remaining == 1 and seq.blocks.ids and has_state and len(self.running) < self.config.max_num_seqs
        seq.waits_at_queueing = self.wait_clock.seconds
        insort(self.running if ready else self.waiting, seq, key=by_order)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence, if it is in a queue. It keeps its blocks."""
        for queue in (self.running, self.waiting):
            if seq in queue:
                queue.remove(seq)
                self._clear_wait(seq)
                self._tenants -= Counter((seq.group.tenant,))

    def schedule(self, num_stages: int = 1) -> list[Slice]:
        """Return the slices of the next step, with no step in flight; empty if nothing can run. With several pipeline
        stages, sequences take turns, and chunks are short while others decode: decoding waits for the chunks of all
        steps."""
        batch: list[Slice] = []
        self._held = by_tenant(self._all, self.shares.stocks[0].num_of) if len(self._tenants) > 1 else {}
        self._make_way()
        with self._choosing(StepEligibility(self.running, (), num_stages if self._may_follow() else 1)):
            self._schedule_decode(batch)
            self._schedule_prefill(batch)
        return batch

    def follow(self, in_flight: list[list[Slice]], num_stages: int = 1) -> list[Slice]:
        """Return the slices of a step to launch while the steps `in_flight` compute; empty if it has to wait for them.
        It waits if a sequence would have to be preempted, or if tenants share the engine and a prompt is to be
        computed: both are decided with no step in flight. With one pipeline stage a sequence continues from the token
        that is still being drawn; with several, other sequences take their turn."""
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
        """Add the decoding sequences to `batch`. Returns False if blocks ran out."""
        for seq in filter(self._eligible.may_run, self._by_precedence(self.running)):
            begin = self._eligible.first_uncomputed(seq)
            left = seq.num_tokens - begin
            if left > 1 or not seq.blocks.ids:
                continue
            if left == 0 and (seq.is_full or not seq.group.prefilled):
                continue  # the token being drawn ends it, or is the first one, which must be read before decoding
            if begin >= len(seq.blocks.ids) * self.layout.block_size and not self._allocate(seq, 1):
                return False
            batch.append(Slice(seq, begin, begin + 1))
        return True

    def _schedule_decode(self, batch: list[Slice]) -> None:
        block_size = self.layout.block_size
        for seq in filter(self._eligible.may_run, self._by_precedence(self.running)):
            if not seq.blocks.ids:  # preempted for an earlier sequence
                continue
            begin, end = seq.num_computed, min(len(seq.token_ids), seq.num_computed + SPAN_TOKENS)  # the least chunk
            has_room = end <= len(seq.blocks.ids) * block_size or self._grow(seq, end)
            if has_room and len(seq.token_ids) == begin + 1:
                batch.append(Slice(seq, begin, end))

    def _schedule_prefill(self, batch: list[Slice]) -> None:
        """Add chunks of running prompts, then of waiting ones, as far as the step has room; tenants take turns. While
        tenants share the engine, those with saved turns get the step to themselves if any of them can run. All others
        get short steps, since another tenant's request may arrive meanwhile."""
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
        if len(self._recent) > 1:
            # If those with saved turns lack blocks, the holders of these blocks must run, or would never release them.
            if self._schedule_chunks(
                {who: [*queue] for who, queue in queues.items() if self._turns.has_saved(who)}, budget, batch
            ):
                return
            budget = min(budget, self._short_step)
        self._schedule_chunks(queues, budget, batch)

    def _schedule_chunks(
        self, queues: dict[bytes, list[tuple[Sequence, bool]]], budget: int, batch: list[Slice]
    ) -> bool:
        """Add chunks from `queues` (by tenant: a sequence, and whether it is waiting). Returns whether any was
        added."""
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
        """Move a waiting sequence to the running ones, if there is a slot and all its blocks. Returns whether it moved.
        After one sequence of a tenant that lacks blocks (`blocked`), the tenant's later ones may enter only if they
        need no new blocks."""
        tenant = seq.group.tenant
        if len(self.running) >= self.config.max_num_seqs:
            return False
        if tenant in blocked and self._lacks_any(seq):
            return False
        if not self._leaves_owed(seq) or not self._allocate_waiting(seq):
            blocked.add(tenant)
            with self.ledger.lock:
                self.shares.note_wait(seq)
            return False
        self.waiting.remove(seq)
        self._clear_wait(seq)
        insort(self.running, seq, key=by_order)
        seq.group.note_wait(seq, self.wait_clock.seconds)
        self._turns.charge(tenant, self.lengths.expected_left(seq.group.request, seq.num_output))
        return True

    def _chunk(self, seq: Sequence, budget: int) -> Slice | None:
        """Return a slice of as many tokens as fit, ending at a span's end or the sequence's, or None if no token
        fits."""
        begin = self._eligible.first_uncomputed(seq)
        end = min(seq.num_tokens, begin + budget)
        missing = seq.blocks.num_lacking(end, self.layout)  # for models with a window, blocks are taken chunk by chunk
        if missing > 0 and not self._allocate(seq, missing):
            end = min(end, len(seq.blocks.ids) * self.layout.block_size)
        if self.ledger.states is not None:
            end = min(end, seq.next_checkpoint(begin, self.ledger.cache.unit_tokens, self.config.checkpoint_step))
        if end < seq.num_tokens:
            end -= end % SPAN_TOKENS
        return Slice(seq, begin, end) if end > begin else None

    # ---- blocks ----

    def _allocate(self, seq: Sequence, num: int) -> bool:
        return seq.blocks.allocate(num, self.ledger, seq.group.holder)

    def _lacks_any(self, seq: Sequence) -> bool:
        return any(num > 0 for num in self.shares.lacked(seq))

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate the blocks for `num_tokens` tokens, preempting the last in order as needed. False if `seq` itself
        was preempted."""
        while (missing := seq.blocks.num_lacking(num_tokens, self.layout)) > 0 and not self._allocate(seq, missing):
            victim = self._last(self.waiting, seq) or self._last(self.running, seq) or seq
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def room_for_draft(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of `num_tokens` proposed tokens a sequence has room for, allocating blocks as needed. Beyond
        its promise it gets blocks only if every other running sequence could still grow: none is preempted for a
        guess."""
        missing = seq.blocks.num_lacking(seq.num_tokens + num_tokens, self.layout)
        if missing > 0:
            unpromised = missing - seq.blocks.reserve
            spare = self.ledger.num_available - len(self.running)
            if (unpromised > 0 and unpromised > spare) or not self._allocate(seq, missing):
                return min(num_tokens, len(seq.blocks.ids) * self.layout.block_size - seq.num_tokens)
        return num_tokens

    def _allocate_waiting(self, seq: Sequence) -> bool:
        """Allocate all blocks and the state of a waiting sequence. Returns False if they are not available. Sequences
        that wait after it are preempted if that frees enough; running ones are not."""
        self._extend_prefix(seq)
        missing, precedence = self.shares.num_to_enter(seq), self._precedence(seq)
        others = (o for o in self.waiting if self._precedence(o) > precedence and not o.group.is_for_taker)
        behind = num_blocks(others, self.ledger.window)
        if not self._fits(seq, missing, behind):
            return False
        while not self._fits(seq, missing):
            victim = self._last(self.waiting, seq)
            if victim is None:
                return False
            self.preempt(victim)
        return self._allocate(seq, missing) and self._enter_state(seq)

    def _enter_state(self, seq: Sequence) -> bool:
        """Take the sequence's state block, preempting later waiting sequences as needed. False if there is none."""
        while not seq.recurrent.enter(self.ledger.states, seq.group.holder, self.copies.state):
            if (victim := self._last(self.waiting, seq)) is None:
                return False
            self.preempt(victim)
        return True

    def _fits(self, seq: Sequence, missing: int, more: int = 0) -> bool:
        """Return whether `missing` blocks can be allocated, when `more` blocks are about to be freed. Promised blocks
        always can. Others must leave one unit for running sequences to grow in, or the next step would preempt
        again."""
        unpromised = missing - seq.blocks.reserve
        margin = self.ledger.cache.blocks_per_unit if self.running else 0
        return unpromised <= 0 or unpromised + margin <= self.ledger.num_available + more

    def _last(self, queue: list[Sequence], seq: Sequence) -> Sequence | None:
        """Return the last in order after `seq` that holds blocks or a promise, or None. A held prefill is never
        returned."""
        precedence = self._precedence(seq)
        for other in reversed(self._by_precedence(queue)):
            if self._precedence(other) <= precedence:
                return None
            if (other.blocks.ids or other.blocks.reserve) and not other.group.is_for_taker:
                return other
        return None

    def _extend_prefix(self, seq: Sequence) -> None:
        """Share units that entered the cache since the sequence was admitted, or that are left of it since it was
        preempted."""
        if seq.group.is_for_taker or seq.num_computed != len(seq.blocks.ids) * self.layout.block_size:
            return
        if not seq.group.reads_cache or seq.recurrent.is_ready:
            return
        seq.extend_prefix(self.ledger, self.layout.block_size)

    def preempt(self, seq: Sequence) -> None:
        """Release the sequence's blocks and queue it again in its old position; its tokens stay."""
        if seq in self.running:
            self.running.remove(seq)
            seq.waits_at_queueing = self.wait_clock.seconds
            insort(self.waiting, seq, key=by_order)
            seq.group.note_preemption()
        seq.give_back(self.ledger)

    # ---- tenants ----

    def _precedence(self, seq: Sequence) -> tuple[int, bytes, tuple[int, int, int]]:
        """Return a sort key: sequences of tenants that hold fewer blocks first, then by order."""
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
        """Return the first waiting sequence of each tenant that runs fewer than its part; empty for a lone tenant."""
        if len(self._tenants) < 2:
            return {}
        return first_below(self._part(len(self._tenants)), self.running, self.waiting)

    def _make_way(self) -> None:
        """Preempt sequences of tenants above their part for tenants below theirs that wait in the loop or for
        admission. Each of these gets a slot and the blocks that it lacks. Called before the step is chosen, so nothing
        in the step is preempted."""
        if not (self._held or self.shares.is_short):
            return
        with self.ledger.lock:
            owed = self.shares.owed()
        num_tenants, starving = len(self._tenants.keys() | owed), self._starving()
        if not num_tenants:  # the owed tenants have stopped asking, and the loop is empty
            return
        most, part = self.config.max_num_seqs - len(starving), self._part(num_tenants)
        while len(self.running) > most and (seq := last_above(part, self.running, lambda seq: 1)):
            self.preempt(seq)
        lacked = {tenant: self.shares.lacked(seq) for tenant, seq in starving.items()}
        for index, (ledger, num_of, margin) in enumerate(self.shares.stocks):
            part, held = max(1, ledger.num_blocks // num_tenants), by_tenant(self._all, num_of)
            num = sum(amounts[index] for amounts in owed.values())
            num += sum(more[index] + margin for who, more in lacked.items() if 0 < more[index] <= part - held[who])
            while num > ledger.num_available and (seq := last_above(part, self._all, num_of)):
                self.preempt(seq)

    def _leaves_owed(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence may take what it lacks without taking what other tenants are owed. If not,
        its tenant's waiting sequences that also lack blocks are preempted: they cannot continue either, and their
        blocks may be the ones owed."""
        if not self.shares.is_short:
            return True
        with self.ledger.lock:
            may_take = self.shares.may_take(seq)
        for other in () if may_take else self.waiting:
            if other.group.tenant == seq.group.tenant and self._lacks_any(other):
                self.preempt(other)
        return may_take

    def _clear_wait(self, seq: Sequence) -> None:
        with self.ledger.lock:
            self.shares.clear_wait(seq)

    # ---- choices ----

    def fork(self, trunk: Sequence, first_tokens: list[FirstToken]) -> None:
        """Fork the prompt into its live choices (at least one), each with its first token. A choice that gets no block
        for its tail starts as preempted."""
        for seq in trunk.group.fork(first_tokens, self.ledger, self.layout.block_size, self.copies):
            self.add(seq)
