"""Admit requests to the engine with a promise of blocks, and take the calls of other threads about them.

    admit            grant a decode worker's credit: KV arrives by set_aside and verify, then start or compute_rest
    submit           prefill and decode on this engine
    accept           prefill for a taker and hold the KV; if a prefix is fetched, verify and compute_rest follow
    offer            lease cached blocks

Every call may come from any thread, takes the ledger's lock and never waits for the loop. lifecycle.py has what
follows.
"""

from baton.engine.adapters.adapters import Adapter, Adapters
from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Acceptance, FirstToken, Key, Refusal, Request
from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.schedule.group_actions import Ending
from baton.engine.schedule.inbox import Park, Resume
from baton.engine.schedule.lifecycle import GroupLifecycle
from baton.engine.schedule.sequence import Sequence, SequenceGroup
from baton.engine.schedule.states import GroupEvent
from baton.engine.schedule.tenant_shares import Amounts, Shares
from baton.protocol import KV_FULL, TOO_LONG
from baton.sampling_params import SamplingParams
from kvtransfer.layout import BlockRef, KVLayout
from kvtransfer.naming import SPAN_TOKENS

CHUNKS_WAITING = 2  # held prefills accepted beyond what runs, in chunks


class Admission:
    """Take the requests of other threads to an engine. Thread-safe: every method takes the ledger's lock."""

    def __init__(
        self, config: EngineConfig, layout: KVLayout, lifecycle: GroupLifecycle, shares: Shares,
        adapters: Adapters,
    ):  # fmt: skip
        self.config = config
        self.layout = layout
        self.lifecycle = lifecycle
        self.ledger: Ledger = lifecycle.ledger
        self.groups = lifecycle.groups
        self.shares = shares
        self.adapters = adapters

    # ---- the decode side: credit first, blocks as they are announced ----

    def admit(self, request: Request, fetches: bool = True) -> int:
        """Promise the blocks that the prompt lacks and those it will grow by, and pin its cached prefix.

        Returns the number of cached tokens. Raises Refusal (too_long, queue_full, kv_full, and for an adapter
        no_adapter, adapter_loading or adapter_slots), or ValueError when the key is in use or its constraint needs
        grammars that this engine does not have.
        """
        with self.ledger.lock:
            self._check(request, request.num_prompt_tokens + request.max_tokens, request.sampling.n)
            # Admit a few more than can run: their KV arrives while others still decode.
            room = self.config.max_num_seqs + max(2, self.config.max_num_seqs // 4)
            num_admitted = self.lifecycle.num_choices
            if num_admitted and not self.shares.has_choices(request, room, num_admitted):
                raise Refusal("queue_full")
            group = self._group(request, Holder.RUNNING)
            trunk = group.trunk
            pinned = self._pin(trunk)
            missing = trunk.blocks.num_lacking(trunk.num_tokens, self.layout)
            credit = self._credit(trunk, missing, fetches)
            needed = Amounts(credit, trunk.recurrent.num_to_have(self.ledger.states, request.sampling.n))
            may_take = self.shares.has_blocks(request, needed)
            may_take = may_take and trunk.recurrent.promise(self.ledger.states, request.sampling.n)
            if not (may_take and self.ledger.reserve(credit)):
                trunk.give_back(self.ledger)
                raise self._kv_full(request, pinned.plus(needed))
            self.shares.clear_shortage(request)
            trunk.blocks.reserve = credit
            group.num_owned = len(trunk.blocks.ids)
            self.lifecycle.happen(group, GroupEvent.ADMIT)
            return group.num_cached_tokens

    def skip(self, key: Key, num_tokens: int) -> int:
        """Return the token at which a fetch of [0, num_tokens) for an admitted key may begin.

        No token that is computed after the fetch attends to the tokens before it. 0 when the key has ended.
        """
        with self.ledger.lock:
            if (group := self.groups.get(key)) is None:
                return 0
            self.lifecycle.happen(group, GroupEvent.SKIP, num_tokens)
            return group.trunk.blocks.num_skipped * self.layout.block_size

    def set_aside(self, key: Key, upto_token: int, first_block: int = 0) -> list[BlockRef]:
        """Return blocks for tokens [0, upto_token) of an admitted key: cached ones, then new ones held as `fetching`.

        The first `first_block` blocks are left out of the result. Raises Refusal (kv_full), or LookupError when the key
        has ended.
        """
        with self.ledger.lock:
            group = self._happen(key, GroupEvent.SET_ASIDE, upto_token)
            return list(self.ledger.refs(group.trunk.blocks.ids[first_block : self.layout.num_blocks(upto_token)]))

    def state_blocks(self, key: Key) -> tuple[BlockRef, ...]:
        """Return the state block of a key after `set_aside`; empty if the model keeps no state. LookupError when the
        key has ended."""
        with self.ledger.lock:
            if (group := self.groups.get(key)) is None:
                raise LookupError(f"{key} is not admitted here, or ended")
            return self._state_refs(group.trunk)

    def verify(self, key: Key, upto_token: int) -> int:
        """Confirm the bytes of tokens [0, upto_token), and return the first token that still has to be computed here.

        Whole units enter the prefix cache. The returned token may be before `upto_token`: a partly filled block does
        not count, nor does anything when a recurrent state stands inside a block. LookupError when the key has
        ended.
        """
        with self.ledger.lock:
            return self._happen(key, GroupEvent.VERIFY, upto_token).trunk.num_computed

    def fetch_settled(self, key: Key) -> None:
        """Note that no byte of the key's fetch can land any more. Idempotent."""
        self.lifecycle.fetch_settled(key)
        self.lifecycle.inbox.ring()

    def start(self, key: Key, first_tokens: tuple[FirstToken, ...]) -> None:
        """Let a fetched prompt decode from its first tokens; choices without one have already finished.

        Raises LookupError when the key has ended, ValueError before its last block was verified.
        """
        with self.ledger.lock:
            self._happen(key, GroupEvent.START, first_tokens)

    def submit(self, request: Request) -> None:
        """Prefill and decode a request on this engine. Raises what `admit` raises."""
        with self.ledger.lock:
            self.admit(request, fetches=False)
            self.compute_rest(request.key)

    # ---- the prefill side: the whole prompt at once, leased to a taker ----

    def accept(self, request: Request, fetches: bool = False) -> Acceptance:
        """Queue a prefill whose KV is held for a taker, and return the blocks of its whole prompt.

        With `fetches` a prefix comes from another worker: missing blocks are held as `fetching`, and computing waits
        for `compute_rest`. Raises what `admit` raises.
        """
        with self.ledger.lock:
            self._check(request, len(request.token_ids) + 1, 1)
            group = self._group(request, Holder.LEASED)
            trunk = group.trunk
            cached = len(self._find(trunk)) * self.layout.block_size
            most, num_tokens = CHUNKS_WAITING * self.config.max_num_batched_tokens, trunk.num_tokens - cached
            num_waiting = self.lifecycle.num_waiting_tokens
            if num_waiting and not self.shares.has_waiting(request, most, num_waiting, num_tokens):
                raise Refusal("queue_full")
            pinned = self._pin(trunk)
            missing = trunk.blocks.num_lacking(trunk.num_tokens, self.layout)
            needed = Amounts(missing, trunk.recurrent.num_to_have(self.ledger.states, 1))
            holder, may_take = Holder.FETCHING if fetches else Holder.LEASED, self.shares.has_blocks(request, needed)
            may_take = may_take and trunk.recurrent.allocate(self.ledger.states, holder)
            group.num_owned = len(trunk.blocks.ids)
            if not (may_take and trunk.blocks.allocate(missing, self.ledger, holder)):
                trunk.give_back(self.ledger)
                raise self._kv_full(request, pinned.plus(needed))
            self.shares.clear_shortage(request)
            self.lifecycle.happen(group, GroupEvent.ACCEPT_PREFIX if fetches else GroupEvent.ACCEPT)
            return Acceptance(self.ledger.refs(trunk.blocks.ids), group.num_cached_tokens, self._state_refs(trunk))

    def begin_fetch(self, key: Key) -> None:
        """Note that bytes may land in a held prefill's blocks until `fetch_settled`. LookupError when the key has
        ended."""
        with self.ledger.lock:
            self._happen(key, GroupEvent.FETCH)

    def compute_rest(self, key: Key) -> None:
        """Compute the tokens that were not fetched, of an admitted prompt or of a held prefill whose fetch has settled.

        Raises Refusal (kv_full), or LookupError when the key has ended.
        """
        with self.ledger.lock:
            self._happen(key, GroupEvent.COMPUTE_REST)

    def offer(self, key: Key, span_hashes: tuple[bytes, ...]) -> Acceptance:
        """Lease the cached blocks of the longest cached prefix of these spans, until `release_lease`.

        Registers no key if no span is cached. Raises ValueError when the key is in use.
        """
        with self.ledger.lock:
            if key in self.groups:
                raise ValueError(f"{key} is in use")
            block_ids = self.ledger.find(span_hashes, len(span_hashes) * SPAN_TOKENS + 1, whole=True)
            if not block_ids or not self.ledger.share(block_ids, Holder.LEASED):
                return Acceptance((), 0)
            request = Request(key, (), 0, SamplingParams(), max_tokens=0)
            group, num_tokens = SequenceGroup(request, Holder.LEASED), len(block_ids) * self.layout.block_size
            group.trunk.blocks.begin(block_ids)
            if not group.trunk.recurrent.pin(self.ledger, span_hashes, num_tokens, Holder.LEASED):
                group.trunk.give_back(self.ledger)
                return Acceptance((), 0)
            self.lifecycle.happen(group, GroupEvent.OFFER)
            return Acceptance(self.ledger.refs(block_ids), num_tokens, self._state_refs(group.trunk))

    def release_lease(self, key: Key) -> None:
        """End the lease of a held prefill or an offer; cancel the prefill if it is still being computed. Idempotent."""
        with self.ledger.lock:
            if (group := self.groups.get(key)) is not None and group.is_for_taker:
                self._give_out(group, GroupEvent.RELEASE_LEASE, Ending())

    # ---- parking: nothing is computed for an answer that nobody reads ----

    def park(self, key: Key) -> None:
        """Stop a decoding key before the next step: its blocks are released, its tokens stay. Idempotent."""
        with self.ledger.lock:
            if (group := self.groups.get(key)) is not None:
                self.lifecycle.inbox.post(Park(key, group.arrival))

    def resume(self, key: Key, deadline: float = float("inf")) -> None:
        """Queue a parked key again, to end at `deadline` (time.monotonic()). LookupError when the key has ended."""
        with self.ledger.lock:
            group = self.groups.get(key)
            if group is None:
                raise LookupError(f"{key} has ended")
            group.deadline = deadline
            self.lifecycle.inbox.post(Resume(key, group.arrival))

    def cancel(self, key: Key) -> None:
        """End a key in any state: between steps if the loop has it, otherwise immediately. Idempotent."""
        with self.ledger.lock:
            if (group := self.groups.get(key)) is not None:
                self._give_out(group, GroupEvent.CANCEL, Ending("cancelled"))

    # ---- private ----

    def _happen(self, key: Key, event: GroupEvent, payload: object = None) -> SequenceGroup:
        group = self.groups.get(key)
        if group is None:
            raise LookupError(f"{key} is not admitted here, or ended")
        self.lifecycle.happen(group, event, payload)
        return group

    def _give_out(self, group: SequenceGroup, event: GroupEvent, ending: Ending) -> None:
        if (ended := self.lifecycle.happen(group, event, ending)) is not None:
            self.lifecycle.inbox.post(ended)

    def _group(self, request: Request, holder: Holder) -> SequenceGroup:
        """Return a new group for the request, with its adapter.

        Raises Refusal (no_adapter, adapter_loading, adapter_slots), or ValueError if its constraint needs grammars that
        this engine does not have.
        """
        group = SequenceGroup(request, holder)
        if request.adapter:
            group.adapter = self.adapters.find(request.adapter, self._adapters_in_use)
        if request.constraint is not None and self.lifecycle.grammars is None:
            raise ValueError("constraint: there are no grammars over this model's tokenizer")
        return group

    def _adapters_in_use(self) -> set[Adapter]:
        return {group.adapter for group in self.groups.values() if group.adapter is not None}

    def _check(self, request: Request, longest: int, num_choices: int) -> None:
        """Raise Refusal (too_long) for a request that could never finish here, or ValueError if its key is in use.

        A request needs `longest` tokens for a sequence, and blocks for the prompt with a tail of its own for each
        choice. So this engine's length limit never ends a choice. Gateways apply the same rule
        (gateway/routing/routing.py, `can_decode` and `can_prefill`).
        """
        num_tokens = len(request.token_ids)
        if request.key in self.groups:
            raise ValueError(f"{request.key} is in use")
        num_blocks = self.layout.num_blocks(num_tokens) + (num_choices - 1) * bool(num_tokens % self.layout.block_size)
        if longest > self.config.max_model_len or num_blocks > self.ledger.num_blocks:
            raise Refusal(TOO_LONG, retry_after_s=0.0)

    def _kv_full(self, request: Request, lacked: Amounts) -> Refusal:
        """Return the refusal for a full pool. A tenant that is owed blocks may retry after 20 ms."""
        if not self.shares.note_shortage(request, lacked):
            return Refusal(KV_FULL)
        self.lifecycle.inbox.ring()
        return Refusal(KV_FULL, retry_after_s=0.02)

    def _credit(self, trunk: Sequence, missing: int, fetches: bool) -> int:
        """Return how many blocks to promise to a prompt that lacks `missing` blocks and will grow."""
        group, window = trunk.group, self.ledger.window
        num_to_grow, n = self.lifecycle.num_to_grow(group.request), group.request.sampling.n
        if fetches and (
            window.keeps_skipped or not group.reads_cache
        ):  # fetched blocks are whole until all have arrived
            most = missing + window.max_blocks(num_to_grow, n)
        else:
            most = window.max_blocks(missing + num_to_grow, n)
        return min(most, self.ledger.num_blocks - trunk.blocks.num_held(window))

    def _find(self, trunk: Sequence) -> list[int]:
        """Return the blocks of the cached prefix, or none if the request may not read the cache.

        A taker gets the whole prefix, because it chooses later where its fetch begins.
        """
        group = trunk.group
        return self.ledger.find(trunk.hashes, trunk.num_tokens, group.is_for_taker) if group.reads_cache else []

    def _pin(self, trunk: Sequence) -> Amounts:
        """Pin the cached prefix, and return how many available blocks that took. Refusal (kv_full) if they are promised
        to others."""
        before = self.shares.available
        block_ids = self._find(trunk)
        num_tokens = len(block_ids) * self.layout.block_size
        num_skipped = 0 if trunk.group.is_for_taker else self.ledger.window.num_skipped_blocks(num_tokens)
        held, num_partial = self.ledger.window.held_of(block_ids, num_skipped)
        if not self.ledger.share(held, trunk.group.holder, num_partial):
            raise self._kv_full(trunk.group.request, self._all_of(trunk, bool(block_ids)))
        trunk.blocks.begin(block_ids, num_skipped)
        if not trunk.recurrent.pin(self.ledger, trunk.hashes, num_tokens, trunk.group.holder):
            trunk.give_back(self.ledger)
            raise self._kv_full(trunk.group.request, self._all_of(trunk, bool(block_ids)))
        trunk.num_computed = trunk.group.num_cached_tokens = num_tokens
        trunk.num_sealed = trunk.num_computed // self.ledger.cache.unit_tokens
        return before.minus(self.shares.available)

    def _all_of(self, trunk: Sequence, has_checkpoint: bool) -> Amounts:
        """Return the blocks that the whole prompt needs, for a request whose cached prefix could not be pinned."""
        num_choices = 1 if trunk.group.is_for_taker else trunk.group.request.sampling.n
        num_states = trunk.recurrent.num_to_have(self.ledger.states, num_choices + has_checkpoint)
        return Amounts(self.layout.num_blocks(trunk.num_tokens), num_states)

    def _state_refs(self, trunk: Sequence) -> tuple[BlockRef, ...]:
        own = trunk.recurrent.block_id if trunk.recurrent.block_id is not None else trunk.recurrent.checkpoint_id
        return () if self.ledger.states is None or own is None else self.ledger.states.refs([own])
