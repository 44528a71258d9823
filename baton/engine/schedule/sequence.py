"""Keep the loop's state of a request: a group for each key, a sequence for each choice."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from itertools import count
from typing import NamedTuple

from torch import Tensor

from baton.constraints.grammar import Grammar, GrammarCursor
from baton.engine.adapters.adapters import Adapter
from baton.engine.core.pooling import Pooler
from baton.engine.core.request import DecodeReport, FinishReason, FirstToken, Request, TokenLogprobs, Waits
from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.kv.recurrent_state import CopyState, RecurrentState
from baton.engine.sampling.step_masks import StepMasks, step_masks
from baton.engine.schedule.counters import DraftCounts
from baton.engine.schedule.sequence_blocks import SequenceBlocks
from baton.engine.schedule.states import GroupState
from kvtransfer.naming import HASH_BYTES, SPAN_TOKENS, SpanHash, span_hash

NO_PARENT = bytes(HASH_BYTES)
_NUM_PREEMPTION_STAMPS = 16
_arrivals = count()


class Copies(NamedTuple):
    """Functions that copy a block, or a state block, within the pool (source, target), between steps."""

    block: Callable[[int, int], None]
    state: CopyState


class Sequence:
    """One choice of a request: its tokens, and the blocks that hold their KV.

        token_ids   |======= prompt =======|== output so far ==|
        KV          |========= num_computed =========|           remaining = 1 while decoding, more before
        blocks      |=====|=====|=====|=====|=====|==   |        num_sealed units of them are named in the cache

    Before its first token a group has one sequence, the trunk; then the trunk becomes the first live choice.
    """

    __slots__ = (
        "group", "choice", "token_ids", "num_computed", "blocks", "num_sealed", "hashes", "order_key", "recurrent",
        "draft_ids", "masks", "waits_at_queueing", "_cursor",
    )  # fmt: skip

    def __init__(self, group: "SequenceGroup", choice: int, token_ids: list[int], hashes: list[bytes]):
        self.group = group
        self.choice = choice
        self.token_ids = token_ids
        self.hashes = hashes  # of the full spans that are named so far
        self.num_computed = 0
        self.blocks = SequenceBlocks()
        self.num_sealed = 0  # units
        # The lowest runs first, the highest is preempted first.
        self.order_key = (-group.request.priority, group.arrival, choice)
        self.recurrent = RecurrentState()
        self.draft_ids: list[int] = []  # proposed after its last token, for the step in flight
        self.waits_at_queueing = Waits()  # WaitClock.seconds when it began to wait
        self.masks: StepMasks | None = None  # of its constraint, for the step in flight
        self._cursor: GrammarCursor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def remaining(self) -> int:
        """The number of tokens whose KV is not computed yet: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.group.request.num_prompt_tokens

    def name_spans(self, num_tokens: int) -> None:
        """Hash the full spans of its first `num_tokens` tokens. Output is hashed too, for the conversation's next
        turn."""
        while self.group.is_named and (begin := len(self.hashes) * SPAN_TOKENS) + SPAN_TOKENS <= num_tokens:
            first = len(self.hashes) == len(self.group.request.span_hashes)
            parent = self.group.request.chain_parent if first else self.hashes[-1]
            self.hashes.append(span_hash(SpanHash(parent), self.token_ids[begin : begin + SPAN_TOKENS]))

    def seal(self, ledger: Ledger) -> None:
        """Name the units whose KV is computed or verified in the prefix cache."""
        cache = ledger.cache
        num_units = self.num_computed // cache.unit_tokens
        if num_units == self.num_sealed or not self.group.is_named:
            return
        self.name_spans(num_units * cache.unit_tokens)
        with ledger.lock:
            for unit in range(self.num_sealed, num_units):
                spans = self.hashes[unit * cache.spans_per_unit : (unit + 1) * cache.spans_per_unit]
                block_ids = self.blocks.ids[unit * cache.blocks_per_unit : (unit + 1) * cache.blocks_per_unit]
                ledger.seal(tuple(spans), tuple(block_ids))
        self.num_sealed = num_units

    def extend_prefix(self, ledger: Ledger, block_size: int) -> None:
        """Share the cached blocks that continue its own computed ones, unless they are promised to others."""
        with ledger.lock:
            self.name_spans(self.num_tokens)
            found = ledger.find(self.hashes, self.num_tokens)
            blocks, window = self.blocks, ledger.window
            num_own, num_tokens = len(blocks.ids), max(len(blocks.ids), len(found)) * block_size
            num_skipped = max(blocks.num_skipped, window.num_skipped_blocks(num_tokens))
            new, num_partial = window.held_of(found[num_own:], max(0, num_skipped - num_own))
            promised = min(window.in_whole_blocks(len(new), len(new) - num_partial), blocks.reserve)
            ledger.unreserve(promised)
            if not ledger.share(new, Holder.RUNNING, num_partial):
                ledger.reserve(promised)
                return
            if new and not self.recurrent.pin(ledger, self.hashes, num_tokens, Holder.RUNNING):
                ledger.release(new, Holder.RUNNING, num_partial)
                ledger.reserve(promised)
                return
            blocks.reserve -= promised
            if new:
                blocks.extend(found[num_own:], num_skipped, ledger, Holder.RUNNING)
            self.num_computed = num_tokens
            self.num_sealed = self.num_computed // ledger.cache.unit_tokens
            if self.group.launched_at is None:
                self.group.num_cached_tokens = self.num_computed

    def give_back(self, ledger: Ledger) -> None:
        """Release its blocks and its promise. Whole units stay in the cache."""
        with ledger.lock:
            self.blocks.give_back(ledger, self.group.holder)
            self.recurrent.give_back(ledger.states, self.group.holder)
            self.num_computed = self.num_sealed = 0

    def begin_after_skipped(self, num_skipped: int, ledger: Ledger) -> None:
        """Release its blocks and begin after `num_skipped` blocks, units that no token to be computed attends to."""
        self.blocks.begin_after_skipped(num_skipped, ledger, self.group.holder)
        self.num_sealed = num_skipped // ledger.cache.blocks_per_unit
        self.num_computed = self.num_sealed * ledger.cache.unit_tokens

    def retire_outside_window(self, ledger: Ledger) -> None:
        """Release the blocks that left the window with its last step, and retire those that are outside now: only
        blocks of sealed units if it is named, and none if they are leased."""
        if ledger.window.num_positions is None or self.group.is_for_taker:
            return
        num_skipped = ledger.window.num_skipped_blocks(self.num_computed)
        if self.group.is_named:
            num_skipped = min(num_skipped, self.num_sealed * ledger.cache.blocks_per_unit)
        self.blocks.retire(num_skipped, ledger, self.group.holder)

    def share_prompt(self, other: "Sequence", ledger: Ledger, block_size: int, copies: "Copies") -> None:
        """Share the full blocks of the prompt with another choice, and copy tail and state for it. It gets nothing if
        there is no block for its tail or its state."""
        blocks, window = self.blocks, ledger.window
        num_full, tail = divmod(self.num_computed, block_size)
        if not self.recurrent.fork(other.recurrent, ledger.states, copies.state):
            return
        reserved = min(bool(tail), blocks.reserve)
        own = ledger.allocate(bool(tail), Holder.RUNNING, reserved)
        if own is None:
            other.recurrent.give_back(ledger.states, Holder.RUNNING)
            return
        blocks.reserve -= reserved
        full, num_partial = window.held_of(blocks.ids[:num_full], blocks.num_skipped)
        ledger.share(full, Holder.RUNNING, num_partial)
        other.blocks.begin(blocks.ids[:num_full] + own)
        other.blocks.fill_skipped(blocks.num_skipped, window)
        other.num_computed, other.num_sealed = self.num_computed, self.num_sealed
        if own:
            copies.block(blocks.ids[num_full], own[0])

    def next_checkpoint(self, begin: int, unit_tokens: int, step: int) -> int:
        """Return the first position after token `begin` with a checkpoint of its state: every `step` tokens (whole
        units), and after the last unit that the same prompt can find again."""
        last, regular = (self.num_tokens - 1) // unit_tokens * unit_tokens, (begin // step + 1) * step
        return last if begin < last < regular else regular

    def keeps_state(self, begin: int, end: int, ledger: Ledger, step: int) -> bool:
        """Return whether its state is kept after a slice [begin, end)."""
        if ledger.states is None or not self.group.is_named:
            return False
        return end == self.next_checkpoint(begin, ledger.cache.unit_tokens, step)

    def note_computed(
        self, begin: int, end: int, ledger: Ledger, step: int, copies: "Copies", goes_on: bool = False
    ) -> None:  # fmt: skip
        """Note that its tokens [begin, end) are computed: seal units, keep a checkpoint, release blocks outside its
        window.

        `goes_on`: a step that is in flight computes more of it.
        """
        self.num_computed = end
        self.seal(ledger)
        self.recurrent.num_pending = 0
        if (states := ledger.states) is not None and self.keeps_state(begin, end, ledger, step):
            self.name_spans(end)
            with ledger.lock:
                self.recurrent.keep(states, self.hashes[end // SPAN_TOKENS - 1], copies.state, goes_on)
        self.retire_outside_window(ledger)

    def append(self, token_id: int) -> FinishReason | None:
        """Append its next token; return why the choice ends with it, or None."""
        self.token_ids.append(token_id)
        # A call of several steps moves the cursor ahead of the tokens that are appended here.
        return self._finish_reason(
            token_id, self.num_output, lambda: self.cursor.num_read == self.num_output and self.cursor.is_over
        )

    def finish_reason(self, token_id: int) -> FinishReason | None:
        """Return why the choice would end with `token_id` as its next token, or None."""
        return self._finish_reason(token_id, self.num_output + 1, lambda: self.cursor.is_over_behind(token_id))

    def _finish_reason(
        self, token_id: int, num_output: int, is_grammar_over: Callable[[], bool]
    ) -> FinishReason | None:
        request = self.group.request
        is_stop = token_id in request.stop_token_ids
        if request.constraint is not None:  # the grammar allows a stop token only where the answer may end
            is_over = is_stop or is_grammar_over()
        else:
            is_over = is_stop and num_output > request.min_tokens
        if is_over:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= request.max_tokens else None

    @property
    def cursor(self) -> GrammarCursor:
        """Its position in the grammar of its constraint, after its last token."""
        if self._cursor is None:
            self._cursor = self.group.compiled().cursor()
        self._cursor.read(self.token_ids, self.group.request.num_prompt_tokens)
        return self._cursor

    def find_masks(self) -> None:
        """Compute the masks of the tokens that its constraint allows after its last token and after each proposal."""
        request = self.group.request
        if request.constraint is not None:
            num_until_stop = request.min_tokens - self.num_output
            vocabulary, stops = self.group.compiled().vocabulary, request.stop_token_ids
            self.masks = step_masks(vocabulary, self.cursor, self.draft_ids, stops, num_until_stop)

    def pop_masks(self) -> StepMasks | None:
        """Return the masks of `find_masks`, and forget them."""
        masks, self.masks = self.masks, None
        return masks

    def mask(self, index: int) -> Tensor | None:
        """Return the mask of a row of this step, or None if any token may be drawn."""
        return None if self.masks is None or index >= self.masks.num_good else self.masks.rows[index]

    @property
    def is_full(self) -> bool:
        """Whether its next token is its last, by length."""
        return self.num_output + 1 >= self.group.request.max_tokens


class SequenceGroup:
    """All choices of one request. They share the prompt's blocks and end together.

    The ledger's lock guards `state` and, until the loop has the group, its trunk. In WAITING and RUNNING the sequences
    belong to the loop alone. A preempted sequence stays in its group, whose other choices may continue.
    """

    def __init__(self, request: Request, holder: Holder):
        self.request = request
        self.key = request.key
        self.tenant = request.tenant_mark
        self.holder = holder  # of its blocks: RUNNING, or LEASED for a held prefill or an offer
        self.state = GroupState.NEW  # set by GroupLifecycle.happen alone
        self.deadline = request.deadline  # replaced when a parked group resumes
        # A span's name is chained to its parent's: a request without all names stays out of the prefix cache.
        num_spans = len(request.token_ids) // SPAN_TOKENS
        self.is_named = len(request.span_hashes) == num_spans and request.chain_parent != NO_PARENT
        self.arrival = next(_arrivals)
        self.last_chosen = 0  # the last round of StepEligibility that chose it
        hashes = list(request.span_hashes) if self.is_named else []
        self.live: list[Sequence] = [Sequence(self, 0, list(request.token_ids), hashes)]
        self.prefilled = False  # the first tokens are drawn, here or on another worker
        # during a fetch, `holder` holds blocks [0, num_owned) of the trunk; the others are FETCHING
        self.num_owned = 0
        self.fetch_settled = True
        # stamps, time.monotonic()
        self.accepted_at = time.monotonic()
        self.launched_at: float | None = None
        self.started_at = 0.0
        self.first_step_at: float | None = None
        self.first_step_s = 0.0
        self.num_waiting_tokens = 0  # of its prompt, until its first chunk is launched
        self.num_cached_tokens = 0
        self.num_chunks = 0
        # of the prompt's tokens after the first, as far as it is computed
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.pooler = None if request.pooling is None else Pooler(request.pooling)
        self.pooled: tuple[float, ...] = ()  # its embedding, once the prompt is computed
        self.num_steps = 0
        self.num_preemptions = 0
        self.preempted_at: tuple[float, ...] = ()
        self.waits = Waits()  # while its prompt is computed, then while it decodes
        self.grammar: Future[Grammar] | None = None  # of its constraint
        self.adapter: Adapter | None = None  # held as long as the group lives, even if its name is removed
        self.drafted = DraftCounts()
        self.saved_s = 0.0  # by speculation, compared with measured plain steps

    def compiled(self) -> Grammar:
        """Return the compiled grammar of its constraint. Groups in the loop have it."""
        assert self.grammar is not None
        return self.grammar.result()

    @property
    def trunk(self) -> Sequence:
        return self.live[0]

    @property
    def reads_cache(self) -> bool:
        """Whether it may continue from a cached prefix."""
        return self.prefilled or self.request.reads_cache

    @property
    def is_for_taker(self) -> bool:
        """Whether its blocks are leased to a taker: a held prefill or an offer."""
        return self.holder is Holder.LEASED

    def fork(self, first_tokens: Seq[FirstToken], ledger: Ledger, block_size: int, copies: Copies) -> list[Sequence]:
        """Make the trunk the first live choice and return new sequences for the others, each with its first token.

        There is at least one first token. Full blocks of the prompt are shared; the tail is copied.
        """
        trunk, prompt = self.trunk, list(self.trunk.token_ids)
        first, *rest = first_tokens
        others = [Sequence(self, each.choice, [*prompt, each.token_id], list(trunk.hashes)) for each in rest]
        self.live += others
        for seq in others:
            trunk.share_prompt(seq, ledger, block_size, copies)
        trunk.recurrent.unpromise(ledger.states)
        trunk.choice = first.choice
        trunk.order_key = (*trunk.order_key[:2], trunk.choice)
        trunk.token_ids.append(first.token_id)
        share = trunk.blocks.reserve // (1 + len(others))
        for seq in others:
            seq.blocks.reserve = share
            trunk.blocks.reserve -= share
        return others

    def note_preemption(self) -> None:
        """Count a preemption, and stamp the first few."""
        self.num_preemptions += 1
        if self.num_preemptions <= _NUM_PREEMPTION_STAMPS:
            self.preempted_at += (time.monotonic(),)

    def note_wait(self, seq: Sequence, waits: Waits) -> None:
        """Add the wait of a sequence that runs now. Choices wait side by side, so only the first one's counts.

        `waits`: WaitClock.seconds now."""
        if seq is self.trunk:
            self.waits = Waits(
                *(own + end - begin for own, begin, end in zip(self.waits, seq.waits_at_queueing, waits, strict=True))
            )

    def note_first_tokens(self) -> None:
        """Note that the first tokens are known, and that the group decodes from now on."""
        self.prefilled, self.waits = True, Waits()
        self.started_at = time.monotonic()

    def note_steps(self, launched_at: float, num_steps: int) -> None:
        """Note that `num_steps` decode steps with this group have passed, launched together at `launched_at`."""
        if self.first_step_at is None:
            self.first_step_at = launched_at
            self.first_step_s = (time.monotonic() - launched_at) / num_steps
        self.num_steps += num_steps

    def report(self) -> DecodeReport:
        """Return the times and counts of its decoding, for the end of the request."""
        if self.first_step_at is None:
            return DecodeReport(num_preemptions=self.num_preemptions, preempted_at=self.preempted_at)
        decode_s = time.monotonic() - self.first_step_at
        drafted = self.drafted
        return DecodeReport(
            decode_queue_s=self.first_step_at - self.started_at,
            first_step_s=self.first_step_s,
            decode_s=decode_s,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            preempted_at=self.preempted_at,
            num_drafts=drafted.num_drafts,
            proposed_by_position=tuple(drafted.proposed),
            accepted_by_position=tuple(drafted.accepted),
            speedup=max(0.0, (decode_s + self.saved_s) / decode_s) if drafted.num_drafts and decode_s > 0 else 1.0,
            waits=self.waits,
        )
