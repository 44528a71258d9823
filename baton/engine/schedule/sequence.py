"""Keep the loop's state of a request: one group per key, one sequence per choice. Mutable, and plain Python."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import NamedTuple

from torch import Tensor

from baton.constraints.grammar import Grammar, GrammarCursor
from baton.engine.adapters.adapters import Adapter
from baton.engine.core.pooling import Pooler
from baton.engine.core.request import DecodeReport, FinishReason, Request, TokenLogprobs, Waits
from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.kv.recurrent_state import CopyState, RecurrentState
from baton.engine.kv.window import Window
from baton.engine.sampling.step_masks import StepMasks, step_masks
from baton.engine.schedule.counters import DraftCounts
from baton.engine.schedule.states import GroupState
from kvtransfer.naming import HASH_BYTES, SPAN_TOKENS, SpanHash, span_hash

NO_PARENT = bytes(HASH_BYTES)
_NUM_PREEMPTION_STAMPS = 16
_arrivals = count()


class Copies(NamedTuple):
    """Copy within the pool, between steps."""

    block: Callable[[int, int], None]
    state: CopyState


class Sequence:
    """One choice: its token record and the blocks that hold its KV.

        token_ids   |======= prompt =======|== output so far ==|
        KV          |========= num_computed =========|           remaining = 1 while decoding, more before
        blocks      |=====|=====|=====|=====|=====|==   |        num_sealed units of them are named in the cache

    Before its first token a group has one sequence, the trunk; then the trunk becomes the first live choice.
    """

    __slots__ = (
        "group", "choice", "token_ids", "num_computed", "block_ids", "num_outside", "leaving", "reserve", "num_sealed",
        "hashes", "order_key", "block_table", "recurrent", "draft_ids", "masks", "waits_at_queueing", "_cursor",
    )  # fmt: skip

    def __init__(self, group: "Group", choice: int, token_ids: list[int], hashes: list[bytes]):
        self.group = group
        self.choice = choice
        self.token_ids = token_ids
        self.hashes = hashes  # of the full spans, as far as they are named yet
        self.num_computed = 0
        self.block_ids: list[int] = []
        # leading blocks outside every window; given back unless Window.is_part, block_ids repeats the next one there
        self.num_outside = 0
        self.leaving: list[int] = []  # blocks that are outside since its last step, and still its own
        self.reserve = 0  # blocks promised to it by the ledger and not yet taken
        self.num_sealed = 0  # units
        self.order_key = (-group.request.priority, group.arrival, choice)  # lowest first; highest is preempted first
        self.block_table = None  # block_ids as a tensor; the runner's
        self.recurrent = RecurrentState()
        self.draft_ids: list[int] = []  # proposed behind its last token, for the step in flight
        self.waits_at_queueing = Waits()  # of all that waited, when it began to wait
        self.masks: StepMasks | None = None  # of a constraint, for the step in flight
        self._cursor: GrammarCursor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not computed yet: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def seen_ids(self) -> list[int]:
        """Return the blocks that it holds all of."""
        return self.leaving + self.block_ids[self.num_outside :]

    def held(self, window: Window) -> tuple[list[int], int]:
        """Return the blocks that it holds, and of how many of these, the first, no more than what stays."""
        if window.is_part:
            return self.block_ids, self.num_outside - len(self.leaving)
        return self.seen_ids, 0

    def num_held(self, window: Window) -> int:
        """Return as how many whole blocks these count."""
        return window.in_blocks(len(self.block_ids), len(self.leaving) + len(self.block_ids) - self.num_outside)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.group.request.num_prompt_tokens

    def name_spans(self, num_tokens: int) -> None:
        """Continues the chain of span hashes up to `num_tokens`: over the output too, for the next turn."""
        while self.group.is_named and (begin := len(self.hashes) * SPAN_TOKENS) + SPAN_TOKENS <= num_tokens:
            first = len(self.hashes) == len(self.group.request.span_hashes)
            parent = self.group.request.chain_parent if first else self.hashes[-1]
            self.hashes.append(span_hash(SpanHash(parent), self.token_ids[begin : begin + SPAN_TOKENS]))

    def seal(self, ledger: Ledger) -> None:
        """Name the units whose KV is written and has passed (or is verified) in the prefix cache."""
        cache = ledger.cache
        num_units = self.num_computed // cache.unit_tokens
        if num_units == self.num_sealed or not self.group.is_named:
            return
        self.name_spans(num_units * cache.unit_tokens)
        with ledger.lock:
            for unit in range(self.num_sealed, num_units):
                spans = self.hashes[unit * cache.spans_per_unit : (unit + 1) * cache.spans_per_unit]
                block_ids = self.block_ids[unit * cache.blocks_per_unit : (unit + 1) * cache.blocks_per_unit]
                ledger.seal(tuple(spans), tuple(block_ids))
        self.num_sealed = num_units

    def extend_prefix(self, ledger: Ledger, block_size: int) -> None:
        """Share what the cache holds behind its blocks, which are all computed; none of it where that is promised to
        others."""
        with ledger.lock:
            self.name_spans(self.num_tokens)
            found = ledger.find(self.hashes, self.num_tokens)
            num_own, num_tokens = len(self.block_ids), max(len(self.block_ids), len(found)) * block_size
            num_outside = max(self.num_outside, ledger.window.num_outside(num_tokens))
            new, num_passed = ledger.window.split(found[num_own:], max(0, num_outside - num_own))
            promised = min(ledger.window.in_blocks(len(new), len(new) - num_passed), self.reserve)
            ledger.unreserve(promised)
            if not ledger.share(new, Holder.RUNNING, num_passed):
                ledger.reserve(promised)
                return
            if new and not self.recurrent.pin(ledger, self.hashes, num_tokens, Holder.RUNNING):
                ledger.release(new, Holder.RUNNING, num_passed)
                ledger.reserve(promised)
                return
            self.reserve -= promised
            if new:
                ledger.leave(self.leaving + self.block_ids[self.num_outside : num_outside], Holder.RUNNING)
                self.leaving, self.block_ids = [], self.block_ids + found[num_own:]
                self.pass_over(num_outside, ledger.window)
            self.num_computed = num_tokens
            self.num_sealed = self.num_computed // ledger.cache.unit_tokens
            if self.group.launched_at is None:
                self.group.num_cached_tokens = self.num_computed

    def give_back(self, ledger: Ledger) -> None:
        """Release its blocks and its promise; whole units of it stay in the cache."""
        with ledger.lock:
            self._release(ledger)
            ledger.unreserve(self.reserve)
            self.recurrent.give_back(ledger.states, self.group.holder)
            self.block_ids, self.leaving, self.num_outside, self.block_table = [], [], 0, None
            self.reserve, self.num_computed, self.num_sealed = 0, 0, 0

    def pass_over(self, num_outside: int, window: Window) -> None:
        """Put the first block that is still seen in the places of all before it, where they do not stay: what gathers
        all of them before it looks reads its own memory there."""
        self.num_outside = num_outside
        if not window.is_part:
            self.block_ids[:num_outside] = self.block_ids[num_outside : num_outside + 1] * num_outside
            self.block_table = None

    def skip(self, num_outside: int, ledger: Ledger) -> None:
        """Begin behind so many blocks, whole units that no token to be computed sees; what it has goes back. The blocks
        behind them are taken next."""
        self._release(ledger)
        self.block_ids, self.num_outside = [0] * num_outside, num_outside
        self.num_sealed = num_outside // ledger.cache.blocks_per_unit
        self.num_computed = self.num_sealed * ledger.cache.unit_tokens

    def leave_window(self, ledger: Ledger) -> None:
        """Give back what left its table with its last step, and take out of it what no token to come sees and is named:
        a step that was launched since may have that in its own. What is leased stays whole."""
        if ledger.window.num_positions is None or self.group.is_for_taker:
            return
        if self.leaving:
            ledger.leave(self.leaving, self.group.holder)
            self.leaving = []
        num_outside = ledger.window.num_outside(self.num_computed)
        if self.group.is_named:
            num_outside = min(num_outside, self.num_sealed * ledger.cache.blocks_per_unit)
        if num_outside > self.num_outside:
            self.leaving = self.block_ids[self.num_outside : num_outside]
            self.pass_over(num_outside, ledger.window)

    def share_prompt(self, other: "Sequence", ledger: Ledger, block_size: int, copies: "Copies") -> None:
        """Give another choice the blocks of the prompt: full ones are shared, the tail is copied, and so is the state.
        It gets none where there is no block for its own."""
        num_full, tail = divmod(self.num_computed, block_size)
        if not self.recurrent.fork(other.recurrent, ledger.states, copies.state):
            return
        reserved = min(bool(tail), self.reserve)
        own = ledger.allocate(bool(tail), Holder.RUNNING, reserved)
        if own is None:
            other.recurrent.give_back(ledger.states, Holder.RUNNING)
            return
        self.reserve -= reserved
        full, num_outside = ledger.window.split(self.block_ids[:num_full], self.num_outside)
        ledger.share(full, Holder.RUNNING, num_outside)
        other.block_ids = self.block_ids[:num_full] + own
        other.pass_over(self.num_outside, ledger.window)
        other.num_computed, other.num_sealed = self.num_computed, self.num_sealed
        if own:
            copies.block(self.block_ids[num_full], own[0])

    def _release(self, ledger: Ledger) -> None:
        block_ids, num_outside = self.held(ledger.window)
        ledger.release(block_ids, self.group.holder, num_outside)

    def next_checkpoint(self, begin: int, unit_tokens: int, step: int) -> int:
        """Return the first place behind token `begin` where its state is kept: every `step` tokens, whole units of the
        cache, and behind the last unit that may be found for the same prompt again."""
        last, regular = (self.num_tokens - 1) // unit_tokens * unit_tokens, (begin // step + 1) * step
        return last if begin < last < regular else regular

    def keeps_state(self, begin: int, end: int, ledger: Ledger, step: int) -> bool:
        """Return whether its state is kept behind its tokens [begin, end)."""
        if ledger.states is None or not self.group.is_named:
            return False
        return end == self.next_checkpoint(begin, ledger.cache.unit_tokens, step)

    def note_computed(
        self, begin: int, end: int, ledger: Ledger, step: int, copies: "Copies", goes_on: bool = False
    ) -> None:  # fmt: skip
        """Its tokens [begin, end) are computed: name what is whole, keep the state where one is kept, and let go of
        what is not seen any more. `goes_on`: a step that was launched since computes more of it."""
        self.num_computed = end
        self.seal(ledger)
        self.recurrent.num_pending = 0
        if (states := ledger.states) is not None and self.keeps_state(begin, end, ledger, step):
            self.name_spans(end)
            with ledger.lock:
                self.recurrent.keep(states, self.hashes[end // SPAN_TOKENS - 1], copies.state, goes_on)
        self.leave_window(ledger)

    def append(self, token_id: int) -> FinishReason | None:
        """Append its next token; return why the choice ends with it, or None."""
        self.token_ids.append(token_id)
        # Within what a call of several steps has drawn, the cursor is ahead.
        return self._finish_reason(
            token_id, self.num_output, lambda: self.cursor.num_read == self.num_output and self.cursor.is_over
        )

    def finish_reason(self, token_id: int) -> FinishReason | None:
        """Return why the choice would end with `token_id` as its next, or None."""
        return self._finish_reason(token_id, self.num_output + 1, lambda: self.cursor.is_over_behind(token_id))

    def _finish_reason(
        self, token_id: int, num_output: int, is_grammar_over: Callable[[], bool]
    ) -> FinishReason | None:
        request = self.group.request
        is_stop = token_id in request.stop_token_ids
        if request.constraint is not None:  # a stop token comes only where the answer may end
            is_over = is_stop or is_grammar_over()
        else:
            is_over = is_stop and num_output > request.min_tokens
        if is_over:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= request.max_tokens else None

    @property
    def cursor(self) -> GrammarCursor:
        """The place of its last token in the grammar of its constraint: made from its tokens, its own or received."""
        if self._cursor is None:
            self._cursor = self.group.compiled().cursor()
        self._cursor.read(self.token_ids, self.group.request.num_prompt_tokens)
        return self._cursor

    def find_masks(self) -> None:
        """Find the tokens that its constraint leaves in this step, behind its last one and behind each proposal."""
        request = self.group.request
        if request.constraint is not None:
            num_until_stop = request.min_tokens - self.num_output
            vocabulary, stops = self.group.compiled().vocabulary, request.stop_token_ids
            self.masks = step_masks(vocabulary, self.cursor, self.draft_ids, stops, num_until_stop)

    def take_masks(self) -> StepMasks | None:
        """Return what `find_masks` has found, which is not kept."""
        masks, self.masks = self.masks, None
        return masks

    def mask(self, index: int) -> Tensor | None:
        """Return the mask of a row of this step; None: any token may be drawn."""
        return None if self.masks is None or index >= self.masks.num_good else self.masks.rows[index]

    @property
    def is_full(self) -> bool:
        """Return whether its next token is its last whichever it is."""
        return self.num_output + 1 >= self.group.request.max_tokens


class Group:
    """All choices of one key: they share the prompt's blocks and end together, once.

    `state` and, until the loop has the group, its trunk are guarded by the ledger's lock; in WAITING and RUNNING the
    sequences belong to the loop alone. One that is preempted stays in its group, whose other choices may continue.
    """

    def __init__(self, request: Request, holder: Holder):
        self.request = request
        self.key = request.key
        self.tenant = request.tenant_mark
        self.holder = holder  # of its blocks: RUNNING, or LEASED for a held prefill
        self.state = GroupState.NEW  # set by GroupLifecycle.happen alone
        self.deadline = request.deadline  # a resume of a parked group brings another
        # Without a name for every span there is none for the next: such a request stays out of the prefix cache.
        num_spans = len(request.token_ids) // SPAN_TOKENS
        self.is_named = len(request.span_hashes) == num_spans and request.chain_parent != NO_PARENT
        self.arrival = next(_arrivals)
        self.last_chosen = 0  # the last round in which it was chosen, where groups take turns
        hashes = list(request.span_hashes) if self.is_named else []
        self.live: list[Sequence] = [Sequence(self, 0, list(request.token_ids), hashes)]
        self.prefilled = False  # the first tokens are drawn, here or on another worker
        # a fetch: blocks [0, num_owned) of the trunk are held by `holder`, those behind it FETCHING
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
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's tokens behind the first, as far as it is read
        self.pooler = None if request.pooling is None else Pooler(request.pooling)
        self.pooled: tuple[float, ...] = ()  # its vector, once the prompt is read
        self.num_steps = 0
        self.num_preemptions = 0
        self.preempted_at: tuple[float, ...] = ()
        self.waits = Waits()  # until its prompt was read, then those since
        self.grammar: Future[Grammar] | None = None  # of its constraint
        self.adapter: Adapter | None = None  # held as long as the group is, whatever becomes of its name
        self.drafted = DraftCounts()
        self.saved_s = 0.0  # against plain steps, as they were measured

    def compiled(self) -> Grammar:
        """Return the grammar of its constraint; what waits in the loop has it."""
        assert self.grammar is not None
        return self.grammar.result()

    @property
    def trunk(self) -> Sequence:
        return self.live[0]

    @property
    def reads_cache(self) -> bool:
        """Return whether a cached prefix may be taken for its next tokens."""
        return self.prefilled or self.request.reads_cache

    @property
    def is_for_taker(self) -> bool:
        """Return whether its blocks are leased to a taker, from its first state on: a held prefill, or an offer."""
        return self.holder is Holder.LEASED

    def note_preemption(self) -> None:
        self.num_preemptions += 1
        if self.num_preemptions <= _NUM_PREEMPTION_STAMPS:
            self.preempted_at += (time.monotonic(),)

    def note_wait(self, seq: Sequence, waits: Waits) -> None:
        """Add what a sequence has waited that runs now; of several choices, which wait side by side, the first counts.
        `waits`: of all that waited, until now."""
        if seq is self.trunk:
            self.waits = Waits(
                *(own + end - begin for own, begin, end in zip(self.waits, seq.waits_at_queueing, waits, strict=True))
            )

    def note_first_tokens(self) -> None:
        """The first tokens are known: what comes now is decoding."""
        self.prefilled, self.waits = True, Waits()
        self.started_at = time.monotonic()

    def note_steps(self, launched_at: float, num_steps: int) -> None:
        """Decode steps with this group in them have passed, computed in one call since `launched_at`."""
        if self.first_step_at is None:
            self.first_step_at = launched_at
            self.first_step_s = (time.monotonic() - launched_at) / num_steps
        self.num_steps += num_steps

    def report(self) -> DecodeReport:
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
