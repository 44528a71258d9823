"""Which sequences the next step computes: continuous batching with chunked prefill, two policies one after the other.

    running   decode     one token each, first in rank first; out of blocks: the last in rank parks
    running   prefill    the rest of the step's tokens, in chunks that end on spans except the last
    waiting ──┘          enters in rank order as far as sequences and blocks allow

Rank is priority, then arrival, then choice. Parking gives a sequence's blocks back (whole units stay in the cache) and
keeps its token record; it waits in its old rank and goes on by a prefix hit, recomputing what was evicted.
"""

from bisect import insort
from collections.abc import Callable
from typing import NamedTuple

from baton.engine.admission import Admission
from baton.engine.config import EngineConfig
from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.request import FirstToken
from baton.engine.sequence import Sequence
from kvtransfer.layout import KVLayout
from kvtransfer.naming import SPAN_TOKENS


class Slice(NamedTuple):
    """Tokens [begin, end) of a sequence, computed in one step; its next token is drawn when they are its last."""

    seq: Sequence
    begin: int
    end: int


def by_rank(seq: Sequence) -> tuple[int, int, int]:
    return seq.rank


class Scheduler:
    """The sequences of the loop. Belongs to the loop's thread; the ledger and the admission guard themselves."""

    def __init__(self, config: EngineConfig, layout: KVLayout, ledger: Ledger, admission: Admission):
        self.config = config
        self.layout = layout
        self.ledger = ledger
        self.admission = admission
        self.waiting: list[Sequence] = []  # both in rank order
        self.running: list[Sequence] = []

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, seq: Sequence) -> None:
        """A decoding sequence that has its blocks joins at once; any other waits its turn."""
        ready = seq.remaining == 1 and seq.block_ids and len(self.running) < self.config.max_num_seqs
        insort(self.running if ready else self.waiting, seq, key=by_rank)

    def remove(self, seq: Sequence) -> None:
        """Forgets a sequence, if it is here; its blocks are still its own."""
        for queue in (self.running, self.waiting):
            if seq in queue:
                queue.remove(seq)

    def schedule(self) -> list[Slice]:
        """The next step's slices; none when nothing can go on."""
        batch: list[Slice] = []
        self._schedule_decode(batch)
        self._schedule_prefill(batch)
        return batch

    def follow(self, slices: list[Slice]) -> list[Slice]:
        """The decode step behind `slices`, a decode step whose tokens are not known yet; none where another would come
        next: something waits that could enter, a prompt is being read, or blocks are missing."""
        if self.waiting and len(self.running) < self.config.max_num_seqs:
            return []
        running = set(self.running)
        going_on = [piece for piece in slices if piece.seq in running]
        if len(going_on) < len(running):
            return []
        following = []
        for seq, _, end in going_on:
            if not seq.is_full:
                if end >= len(seq.block_ids) * self.layout.block_size and not self._take(seq, 1):
                    return []
                following.append(Slice(seq, end, end + 1))
        return following

    def _schedule_decode(self, batch: list[Slice]) -> None:
        index, block_size = 0, self.layout.block_size
        while index < len(self.running):
            seq = self.running[index]
            num_computed = seq.num_computed
            if len(seq.token_ids) - num_computed == 1:
                if num_computed >= len(seq.block_ids) * block_size and not self._grow(seq):
                    continue  # it parked, the next one stands here now
                batch.append(Slice(seq, num_computed, num_computed + 1))
            index += 1

    def _schedule_prefill(self, batch: list[Slice]) -> None:
        budget = self.config.max_num_batched_tokens - len(batch)
        for seq in self.running:
            if seq.remaining > 1 and (chunk := self._chunk(seq, budget)):
                batch.append(chunk)
                budget -= chunk.end - chunk.begin
        blocked = False
        for seq in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                break
            # Behind one that lacks blocks only those go on that take none from it: they will give theirs back.
            if (blocked and self._missing(seq) > seq.reserve) or not self._enter(seq):
                blocked = True
                continue
            self.waiting.remove(seq)
            insort(self.running, seq, key=by_rank)
            if not (chunk := self._chunk(seq, budget)):
                break
            batch.append(chunk)
            budget -= chunk.end - chunk.begin

    def _chunk(self, seq: Sequence, budget: int) -> Slice | None:
        """As many of the sequence's tokens as fit, up to a span's end or the sequence's; None when that is none."""
        begin, end = seq.num_computed, min(seq.num_tokens, seq.num_computed + budget)
        if end < seq.num_tokens:
            end -= end % SPAN_TOKENS
        return Slice(seq, begin, end) if end > begin else None

    # ---- blocks ----

    def _missing(self, seq: Sequence) -> int:
        return self.layout.num_blocks(seq.num_tokens) - len(seq.block_ids)

    def _take(self, seq: Sequence, num: int) -> bool:
        """`num` more blocks for a sequence, from its promise first."""
        reserved = min(num, seq.reserve)
        block_ids = self.ledger.allocate(num, seq.group.holder, reserved)
        if block_ids is None:
            return False
        seq.reserve -= reserved
        seq.block_ids += block_ids
        seq.block_table = None
        return True

    def _grow(self, seq: Sequence) -> bool:
        """A block for the token to be computed; parks the last in rank until there is one. False: that was `seq`."""
        while (missing := self._missing(seq)) and not self._take(seq, missing):
            victim = self._last(self.waiting, seq) or self._last(self.running, seq) or seq
            self.park(victim)
            if victim is seq:
                return False
        return True

    def room_for_draft(self, seq: Sequence, num_tokens: int) -> int:
        """How many of so many proposals behind its last token a sequence has blocks for. It takes more from its
        promise, or if every other that runs could still grow: nobody parks for a guess."""
        missing = self.layout.num_blocks(seq.num_tokens + num_tokens) - len(seq.block_ids)
        if missing > 0:
            unpromised = missing - seq.reserve
            spare = self.ledger.num_available - len(self.running)
            if (unpromised > 0 and unpromised > spare) or not self._take(seq, missing):
                return min(num_tokens, len(seq.block_ids) * self.layout.block_size - seq.num_tokens)
        return num_tokens

    def _enter(self, seq: Sequence) -> bool:
        """All blocks for a waiting sequence. What waits behind it gives way if that is enough, what runs does not."""
        self._extend_prefix(seq)
        missing = self._missing(seq)
        behind = sum(len(o.block_ids) + o.reserve for o in self.waiting if o.rank > seq.rank and not o.group.is_held)
        if not self._fits(seq, missing, behind):
            return False
        while not self._fits(seq, missing):
            victim = self._last(self.waiting, seq)
            if victim is None:
                return False
            self.park(victim)
        return self._take(seq, missing)

    def _fits(self, seq: Sequence, missing: int, more: int = 0) -> bool:
        """What was promised always does; else one unit must be left to grow in, or the next step would park again.
        `more`: blocks beyond those that are there now."""
        unpromised = missing - seq.reserve
        margin = self.ledger.cache.blocks_per_unit if self.running else 0
        return unpromised <= 0 or unpromised + margin <= self.ledger.num_available + more

    def _last(self, queue: list[Sequence], seq: Sequence) -> Sequence | None:
        """The last in rank behind `seq` that holds anything; a held prefill is never parked."""
        for other in reversed(queue):
            if other.rank <= seq.rank:
                return None
            if (other.block_ids or other.reserve) and not other.group.is_held:
                return other
        return None

    def _extend_prefix(self, seq: Sequence) -> None:
        """Units that came into the cache since the sequence was admitted, or that are left of it since it parked."""
        if seq.group.is_held or seq.num_computed != len(seq.block_ids) * self.layout.block_size:
            return
        with self.ledger.lock:
            seq.name_spans(seq.num_tokens)
            found = self.ledger.find(seq.hashes, seq.num_tokens)[len(seq.block_ids) :]
            promised = min(len(found), seq.reserve)
            self.ledger.unreserve(promised)
            if not self.ledger.share(found, Holder.RUNNING):
                self.ledger.reserve(promised)
                return
            seq.reserve -= promised
            seq.block_ids += found
            seq.block_table = None
            seq.num_computed = len(seq.block_ids) * self.layout.block_size
            seq.num_sealed = seq.num_computed // self.ledger.cache.unit_tokens
            if seq.group.launched_at is None:
                seq.group.num_cached_tokens = seq.num_computed

    def park(self, seq: Sequence) -> None:
        """Preemption: blocks back, record kept, the same place in the queue."""
        if seq in self.running:
            self.running.remove(seq)
            insort(self.waiting, seq, key=by_rank)
            seq.group.preempted()
        self.admission.give_back(seq)

    # ---- choices ----

    def fork(self, trunk: Sequence, first_tokens: list[FirstToken], copy_block: Callable[[int, int], None]) -> None:
        """From the prompt to the choices that go on (at least one), each with its first token. They share the full
        blocks; the tail is copied. A choice that finds no block for its tail starts parked."""
        group, prompt = trunk.group, list(trunk.token_ids)
        others = [
            Sequence(group, first.choice, [*prompt, first.token_id], list(trunk.hashes)) for first in first_tokens[1:]
        ]
        group.live += others
        for seq in others:
            self._share_prompt(trunk, seq, copy_block)
        trunk.choice = first_tokens[0].choice
        trunk.rank = (*trunk.rank[:2], trunk.choice)
        trunk.token_ids.append(first_tokens[0].token_id)
        share = trunk.reserve // (1 + len(others))
        for seq in others:
            seq.reserve = share
            trunk.reserve -= share
            self.add(seq)

    def _share_prompt(self, trunk: Sequence, seq: Sequence, copy_block: Callable[[int, int], None]) -> None:
        num_full, tail = divmod(trunk.num_computed, self.layout.block_size)
        reserved = min(bool(tail), trunk.reserve)
        own = self.ledger.allocate(bool(tail), Holder.RUNNING, reserved)
        if own is None:
            return
        trunk.reserve -= reserved
        self.ledger.share(trunk.block_ids[:num_full], Holder.RUNNING)
        seq.block_ids = trunk.block_ids[:num_full] + own
        seq.num_computed, seq.num_sealed = trunk.num_computed, trunk.num_sealed
        if own:
            copy_block(trunk.block_ids[num_full], own[0])
