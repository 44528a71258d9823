"""The door of the engine: which requests may come in, with which promise of blocks, and what other threads may say of
them.

    admit            a decode worker's credit: its KV comes by set_aside and verify, then start or compute_rest
    submit           prefill and decode here
    accept           a prefill held for a taker; one that fetches a prefix continues by verify and compute_rest
    offer            a lease on what is cached

Everything here is answered at once, on any thread, under the ledger's lock. What follows is in lifecycle.py.
"""

from baton.engine.adapters.adapters import Adapter, Adapters
from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Acceptance, FirstToken, Key, Refusal, Request
from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.schedule.inbox import Park, Resume
from baton.engine.schedule.lifecycle import Ending, GroupLifecycle
from baton.engine.schedule.sequence import Group, Sequence
from baton.engine.schedule.states import GroupEvent
from baton.engine.schedule.tenant_shares import Amounts, Shares
from baton.protocol import KV_FULL, TOO_LONG
from baton.sampling_params import SamplingParams
from kvtransfer.layout import BlockRef, KVLayout
from kvtransfer.naming import SPAN_TOKENS

CHUNKS_WAITING = 2  # held prefills accepted beyond what runs, in chunks


class Admission:
    """Requests of other threads to an engine. Thread-safe: every method takes the ledger's lock."""

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
        """Promise the blocks that are missing here and those for growth, and pin the cached prefix. Returns the number
        of cached tokens. Raises Refusal: too_long, queue_full, kv_full, or that of its adapter (no_adapter,
        adapter_loading, adapter_slots); ValueError when the key is in use, or where there are no grammars for its
        constraint."""
        with self.ledger.lock:
            self._check(request, request.num_prompt_tokens + request.max_tokens, request.sampling.n)
            # A few more than can run: their KV arrives while others still decode.
            room = self.config.max_num_seqs + max(2, self.config.max_num_seqs // 4)
            num_admitted = self.lifecycle.num_choices
            if num_admitted and not self.shares.has_choices(request, room, num_admitted):
                raise Refusal("queue_full")
            group = self._group(request, Holder.RUNNING)
            trunk = group.trunk
            pinned = self._pin(trunk)
            missing = self.layout.num_blocks(trunk.num_tokens) - len(trunk.block_ids)
            credit = self._credit(trunk, missing, fetches)
            needed = Amounts(credit, trunk.recurrent.num_to_have(self.ledger.states, request.sampling.n))
            may_take = self.shares.has_blocks(request, needed)
            may_take = may_take and trunk.recurrent.promise(self.ledger.states, request.sampling.n)
            if not (may_take and self.ledger.reserve(credit)):
                trunk.give_back(self.ledger)
                raise self._kv_full(request, pinned.plus(needed))
            self.shares.clear_shortage(request)
            trunk.reserve = credit
            group.num_owned = len(trunk.block_ids)
            self.lifecycle.happen(group, GroupEvent.ADMIT)
            return group.num_cached_tokens

    def skip(self, key: Key, num_tokens: int) -> int:
        """Return the token before which a fetch of [0, num_tokens) has nothing to bring to an admitted key: none that
        is computed behind them sees what is there. 0 when the key has ended."""
        with self.ledger.lock:
            if (group := self.groups.get(key)) is None:
                return 0
            self.lifecycle.happen(group, GroupEvent.SKIP, num_tokens)
            return group.trunk.num_outside * self.layout.block_size

    def set_aside(self, key: Key, upto_token: int, first_block: int = 0) -> list[BlockRef]:
        """Return blocks for tokens [0, upto_token) of an admitted key: the cached ones, then new ones, held `fetching`;
        `first_block`: without so many of the first. Raises Refusal: kv_full; LookupError when the key has ended."""
        with self.ledger.lock:
            group = self._happen(key, GroupEvent.SET_ASIDE, upto_token)
            return list(self.ledger.refs(group.trunk.block_ids[first_block : self.layout.num_blocks(upto_token)]))

    def state_blocks(self, key: Key) -> tuple[BlockRef, ...]:
        """Return the block for the state of a key for which blocks were set aside; none where its model keeps none.
        LookupError when the key has ended."""
        with self.ledger.lock:
            if (group := self.groups.get(key)) is None:
                raise LookupError(f"{key} is not admitted here, or ended")
            return self._state_refs(group.trunk)

    def verify(self, key: Key, upto_token: int) -> int:
        """Confirm tokens [0, upto_token): whole units enter the prefix cache. Return the first token that is to be
        computed here still, which may be one before: a part of a block is, and all where a state stands inside of one.
        LookupError when the key has ended."""
        with self.ledger.lock:
            return self._happen(key, GroupEvent.VERIFY, upto_token).trunk.num_computed

    def fetch_settled(self, key: Key) -> None:
        """Say that no byte of the key's fetch can land any more. Idempotent."""
        self.lifecycle.fetch_settled(key)
        self.lifecycle.inbox.ring()

    def start(self, key: Key, first_tokens: tuple[FirstToken, ...]) -> None:
        """Let a fetched prompt join the batch; choices that are missing have finished with their first token.
        LookupError when the key has ended, ValueError before its last block was verified."""
        with self.ledger.lock:
            self._happen(key, GroupEvent.START, first_tokens)

    def submit(self, request: Request) -> None:
        """Prefill and decode here, from the first token. Raises what admit does."""
        with self.ledger.lock:
            self.admit(request, fetches=False)
            self.compute_rest(request.key)

    # ---- the prefill side: the whole prompt at once, leased to a taker ----

    def accept(self, request: Request, fetches: bool = False) -> Acceptance:
        """Return blocks for the whole prompt of a held prefill, in its queue; one that `fetches` a prefix from
        elsewhere waits for `compute_rest`, and what is missing is held `fetching`. Raises what admit
        does."""
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
            missing = self.layout.num_blocks(trunk.num_tokens) - len(trunk.block_ids)
            needed = Amounts(missing, trunk.recurrent.num_to_have(self.ledger.states, 1))
            holder, may_take = Holder.FETCHING if fetches else Holder.LEASED, self.shares.has_blocks(request, needed)
            may_take = may_take and trunk.recurrent.take(self.ledger.states, holder)
            block_ids = self.ledger.allocate(missing, holder) if may_take else None
            if block_ids is None:
                trunk.give_back(self.ledger)
                raise self._kv_full(request, pinned.plus(needed))
            self.shares.clear_shortage(request)
            group.num_owned = len(trunk.block_ids)
            trunk.block_ids += block_ids
            self.lifecycle.happen(group, GroupEvent.ACCEPT_PREFIX if fetches else GroupEvent.ACCEPT)
            return Acceptance(self.ledger.refs(trunk.block_ids), group.num_cached_tokens, self._state_refs(trunk))

    def begin_fetch(self, key: Key) -> None:
        """Say that bytes may land in the blocks of a held prefill from here on, until `fetch_settled`. LookupError when
        the key has ended."""
        with self.ledger.lock:
            self._happen(key, GroupEvent.FETCH)

    def compute_rest(self, key: Key) -> None:
        """Compute here what no fetch has brought: of an admitted prompt, or of a held prefill, whose fetch has settled.
        Raises Refusal: kv_full; LookupError when the key has ended."""
        with self.ledger.lock:
            self._happen(key, GroupEvent.COMPUTE_REST)

    def offer(self, key: Key, span_hashes: tuple[bytes, ...]) -> Acceptance:
        """Lease the cached blocks of these spans, as many as are here; where there are none no key is registered. Ended
        by release_lease. ValueError when the key is in use."""
        with self.ledger.lock:
            if key in self.groups:
                raise ValueError(f"{key} is in use")
            block_ids = self.ledger.find(span_hashes, len(span_hashes) * SPAN_TOKENS + 1, whole=True)
            if not block_ids or not self.ledger.share(block_ids, Holder.LEASED):
                return Acceptance((), 0)
            request = Request(key, (), 0, SamplingParams(), max_tokens=0)
            group, num_tokens = Group(request, Holder.LEASED), len(block_ids) * self.layout.block_size
            group.trunk.block_ids = block_ids
            if not group.trunk.recurrent.pin(self.ledger, span_hashes, num_tokens, Holder.LEASED):
                group.trunk.give_back(self.ledger)
                return Acceptance((), 0)
            self.lifecycle.happen(group, GroupEvent.OFFER)
            return Acceptance(self.ledger.refs(block_ids), num_tokens, self._state_refs(group.trunk))

    def release_lease(self, key: Key) -> None:
        """End a held prefill or an offer: its taker has all it wanted, or never will. One that is still computed is
        cancelled. Idempotent."""
        with self.ledger.lock:
            if (group := self.groups.get(key)) is not None and group.is_for_taker:
                self._give_out(group, GroupEvent.RELEASE_LEASE, Ending())

    # ---- parking: without a reader nothing is computed ----

    def park(self, key: Key) -> None:
        """Stop a decoding key before the next step: it holds no block any more, its token record stays. Idempotent."""
        with self.ledger.lock:
            if (group := self.groups.get(key)) is not None:
                self.lifecycle.inbox.post(Park(key, group.arrival))

    def resume(self, key: Key, deadline: float = float("inf")) -> None:
        """Resume a parked key by a prefix hit, until `deadline` (time.monotonic()). Raises LookupError when it has
        ended."""
        with self.ledger.lock:
            group = self.groups.get(key)
            if group is None:
                raise LookupError(f"{key} has ended")
            group.deadline = deadline
            self.lifecycle.inbox.post(Resume(key, group.arrival))

    def cancel(self, key: Key) -> None:
        """End a key in any state, once: between steps where the loop has it, else now. Idempotent."""
        with self.ledger.lock:
            if (group := self.groups.get(key)) is not None:
                self._give_out(group, GroupEvent.CANCEL, Ending("cancelled"))

    # ---- private ----

    def _happen(self, key: Key, event: GroupEvent, subject: object = None) -> Group:
        group = self.groups.get(key)
        if group is None:
            raise LookupError(f"{key} is not admitted here, or ended")
        self.lifecycle.happen(group, event, subject)
        return group

    def _give_out(self, group: Group, event: GroupEvent, ending: Ending) -> None:
        if (ended := self.lifecycle.happen(group, event, ending)) is not None:
            self.lifecycle.inbox.post(ended)

    def _group(self, request: Request, holder: Holder) -> Group:
        """Return a new group. Raises Refusal: no_adapter, adapter_loading, adapter_slots; ValueError where there are no
        grammars for its constraint."""
        group = Group(request, holder)
        if request.adapter:
            group.adapter = self.adapters.find(request.adapter, self._adapters_in_use)
        if request.constraint is not None and self.lifecycle.grammars is None:
            raise ValueError("constraint: there are no grammars over this model's tokenizer")
        return group

    def _adapters_in_use(self) -> set[Adapter]:
        return {group.adapter for group in self.groups.values() if group.adapter is not None}

    def _check(self, request: Request, longest: int, num_choices: int) -> None:
        """Refuses what could never run here to its end: `longest` tokens of a sequence, and behind the prompt a block
        of its own for each choice. So no choice is ever ended by this engine's length; gateways ask by the same rule
        (gateway/routing/routing.py, `can_decode` and `can_prefill`)."""
        num_tokens = len(request.token_ids)
        if request.key in self.groups:
            raise ValueError(f"{request.key} is in use")
        num_blocks = self.layout.num_blocks(num_tokens) + (num_choices - 1) * bool(num_tokens % self.layout.block_size)
        if longest > self.config.max_model_len or num_blocks > self.ledger.num_blocks:
            raise Refusal(TOO_LONG, retry_after_s=0.0)

    def _kv_full(self, request: Request, lacked: Amounts) -> Refusal:
        """Return the refusal for a full pool. A tenant to whom blocks are owed may retry after 20 ms."""
        if not self.shares.note_shortage(request, lacked):
            return Refusal(KV_FULL)
        self.lifecycle.inbox.ring()
        return Refusal(KV_FULL, retry_after_s=0.02)

    def _credit(self, trunk: Sequence, missing: int, fetches: bool) -> int:
        """Return how many blocks to promise to what lacks `missing` of its prompt, and will grow."""
        group, window = trunk.group, self.ledger.window
        num_to_grow, n = self.lifecycle.num_to_grow(group.request), group.request.sampling.n
        if fetches and (window.is_part or not group.reads_cache):  # what is fetched is whole until it has come
            most = missing + window.most_blocks(num_to_grow, n)
        else:
            most = window.most_blocks(missing + num_to_grow, n)
        return min(most, self.ledger.num_blocks - trunk.num_held(window))

    def _find(self, trunk: Sequence) -> list[int]:
        """Return the blocks of the cached prefix, where the request may read one: all of it for a taker, who says later
        from where on."""
        group = trunk.group
        return self.ledger.find(trunk.hashes, trunk.num_tokens, group.is_for_taker) if group.reads_cache else []

    def _pin(self, trunk: Sequence) -> Amounts:
        """Take the cached prefix; return how many blocks less there are for others. Refusal where they are promised."""
        before = self.shares.available
        block_ids = self._find(trunk)
        num_tokens = len(block_ids) * self.layout.block_size
        num_outside = 0 if trunk.group.is_for_taker else self.ledger.window.num_outside(num_tokens)
        held, num_passed = self.ledger.window.split(block_ids, num_outside)
        if not self.ledger.share(held, trunk.group.holder, num_passed):
            raise self._kv_full(trunk.group.request, self._all_of(trunk, bool(block_ids)))
        trunk.block_ids, trunk.num_outside = block_ids, num_outside
        if not trunk.recurrent.pin(self.ledger, trunk.hashes, num_tokens, trunk.group.holder):
            trunk.give_back(self.ledger)
            raise self._kv_full(trunk.group.request, self._all_of(trunk, bool(block_ids)))
        trunk.num_computed = trunk.group.num_cached_tokens = num_tokens
        trunk.num_sealed = trunk.num_computed // self.ledger.cache.unit_tokens
        return before.minus(self.shares.available)

    def _all_of(self, trunk: Sequence, has_checkpoint: bool) -> Amounts:
        """Return what a prompt takes that could not pin its prefix."""
        num_choices = 1 if trunk.group.is_for_taker else trunk.group.request.sampling.n
        num_states = trunk.recurrent.num_to_have(self.ledger.states, num_choices + has_checkpoint)
        return Amounts(self.layout.num_blocks(trunk.num_tokens), num_states)

    def _state_refs(self, trunk: Sequence) -> tuple[BlockRef, ...]:
        own = trunk.recurrent.block_id if trunk.recurrent.block_id is not None else trunk.recurrent.checkpoint_id
        return () if self.ledger.states is None or own is None else self.ledger.states.refs([own])
