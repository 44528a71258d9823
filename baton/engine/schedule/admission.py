"""The door of the engine: who may come in, with which promise of blocks, and how a key ends.

    admit ─► FETCHING ─ set_aside, verified ─ start ─►┐
               └────────── compute_rest ─────────────►├─ the loop's (WAITING, RUNNING) ─► end
    submit, accept ──────────────────────────────────►┘  ▲ │  └─ held prefill ─► HELD ─► end
                                                  resume └─┴ park ─► PARKED ─► end
      └─► FETCHING a prefix ─ verified ─ compute_rest ►┘
    offer ─► HELD ─► end

Everything here is answered at once, on any thread, under the ledger's lock. A group in the loop is only marked or
posted to; the loop gives its blocks back between steps. Any other may be ended by any thread at any time: who looks one
up does what follows under the same lock.
"""

import time

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Acceptance, FirstToken, Key, Refusal, Request, RequestEnded, SamplingParams, State
from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.schedule.groups import Groups
from baton.engine.schedule.inbox import Enter, Inbox, Park, Resume, Start, Stop
from baton.engine.schedule.sequence import Group, Sequence
from baton.engine.schedule.tenant_shares import Shares
from kvtransfer.layout import BlockRef, KVLayout
from kvtransfer.naming import SPAN_TOKENS

FIRST_GUESS_TOKENS = 64  # output length expected before any was observed
AVERAGE_WEIGHT = 0.05  # of one more observed output length
CHUNKS_WAITING = 2  # held prefills accepted beyond what runs, in chunks


class Admission:
    """All live keys of one engine. Thread-safe: every method takes the ledger's lock."""

    def __init__(self, config: EngineConfig, layout: KVLayout, ledger: Ledger, inbox: Inbox):
        self.config = config
        self.layout = layout
        self.ledger = ledger
        self.inbox = inbox
        self.groups = Groups()
        self.shares = Shares(config, layout, ledger, self.groups)
        self.num_waiting_tokens = 0  # of prompts that wait for their first chunk
        self._num_choices = 0  # admitted and not ended
        self._expected_output = float(FIRST_GUESS_TOKENS)
        self._quarantined: dict[Key, list[int]] = {}

    # ---- the decode side: credit first, blocks as they are announced ----

    def admit(self, request: Request) -> int:
        """Credit for the blocks that are missing here and for growth; the cached prefix is pinned. Returns the number
        of cached tokens. Refusal: too_long, queue_full, kv_full."""
        with self.ledger.lock:
            self._check(request, request.num_prompt_tokens + request.max_tokens, request.sampling.n)
            # A few more than can run: their KV arrives while others still decode.
            room = self.config.max_num_seqs + max(2, self.config.max_num_seqs // 4)
            if self._num_choices and not self.shares.has_choices(request, room, self._num_choices):
                raise Refusal("queue_full")
            group = Group(request, Holder.RUNNING, State.FETCHING)
            trunk = group.trunk
            self._pin(trunk)
            missing = self.layout.num_blocks(trunk.num_tokens) - len(trunk.block_ids)
            credit = min(missing + self._growth(request), self.ledger.num_blocks - len(trunk.block_ids))
            if not (self.shares.has_blocks(request, credit) and self.ledger.reserve(credit)):
                self.ledger.release(trunk.block_ids, Holder.RUNNING)
                raise self._kv_full(request, credit)
            self.shares.taken(request)
            trunk.reserve = credit
            group.num_owned = len(trunk.block_ids)
            self._num_choices += request.sampling.n
            self._register(group)
            return group.num_cached_tokens

    def set_aside(self, key: Key, upto_token: int) -> list[BlockRef]:
        """Blocks for tokens [0, upto_token) of an admitted key: the cached ones, then new ones, held `fetching`."""
        with self.ledger.lock:
            group = self._fetching(key)
            trunk = group.trunk
            if upto_token > trunk.num_tokens:
                raise ValueError(f"{key}: set_aside up to {upto_token} of {trunk.num_tokens} tokens")
            wanted = self.layout.num_blocks(upto_token)
            if (missing := wanted - len(trunk.block_ids)) > 0:
                block_ids = self.ledger.allocate(missing, Holder.FETCHING, reserved=min(missing, trunk.reserve))
                if block_ids is None:
                    raise Refusal("kv_full")
                trunk.reserve -= min(missing, trunk.reserve)
                trunk.block_ids += block_ids
                group.fetch_settled = False
            return list(self.ledger.refs(trunk.block_ids[:wanted]))

    def verified(self, key: Key, upto_token: int) -> None:
        """Tokens [0, upto_token) are confirmed: fetching -> running, whole units enter the prefix cache."""
        with self.ledger.lock:
            group = self._fetching(key)
            trunk = group.trunk
            whole = upto_token >= trunk.num_tokens
            num_owned = self.layout.num_blocks(upto_token) if whole else upto_token // self.layout.block_size
            if num_owned > len(trunk.block_ids) or upto_token > trunk.num_tokens:
                raise ValueError(f"{key}: verified up to {upto_token}, {len(trunk.block_ids)} blocks were set aside")
            if num_owned > group.num_owned:
                self.ledger.move(trunk.block_ids[group.num_owned : num_owned], Holder.FETCHING, group.holder)
                group.num_owned = num_owned
                trunk.num_computed = upto_token if whole else num_owned * self.layout.block_size
                self.seal(trunk)

    def fetch_settled(self, key: Key) -> None:
        """No byte of the key's fetch can land any more."""
        with self.ledger.lock:
            self.ledger.release(self._quarantined.pop(key, []), Holder.QUARANTINED)
            if (group := self.groups.get(key)) is not None:
                group.fetch_settled = True

    def start(self, key: Key, first_tokens: tuple[FirstToken, ...]) -> None:
        with self.ledger.lock:
            group = self._fetching(key)
            if group.trunk.num_computed < group.trunk.num_tokens:
                raise ValueError(f"{key}: start before the last block was verified")
            group.state = State.WAITING
            group.started()
            self.inbox.post(Start(key, group.arrival, tuple(first_tokens)))

    def submit(self, request: Request) -> None:
        """Prefill and decode here. Refusal as of admit."""
        with self.ledger.lock:
            self.admit(request)
            self.compute_rest(request.key)

    # ---- the prefill side: the whole prompt at once, leased to a taker ----

    def accept(self, request: Request, fetches: bool = False) -> Acceptance:
        """Blocks for the whole prompt of a held prefill, in its queue; one that `fetches` a prefix from elsewhere
        waits for `compute_rest`, and what is missing is held `fetching`. Refusal: too_long, queue_full, kv_full."""
        with self.ledger.lock:
            self._check(request, len(request.token_ids) + 1, 1)
            group = Group(request, Holder.LEASED, State.FETCHING if fetches else State.WAITING)
            trunk = group.trunk
            cached = len(self.ledger.find(trunk.hashes, trunk.num_tokens)) * self.layout.block_size
            most, num_tokens = CHUNKS_WAITING * self.config.max_num_batched_tokens, trunk.num_tokens - cached
            if self.num_waiting_tokens and not self.shares.has_waiting(
                request, most, self.num_waiting_tokens, num_tokens
            ):
                raise Refusal("queue_full")
            self._pin(trunk)
            missing = self.layout.num_blocks(trunk.num_tokens) - len(trunk.block_ids)
            holder, may_take = Holder.FETCHING if fetches else Holder.LEASED, self.shares.has_blocks(request, missing)
            block_ids = self.ledger.allocate(missing, holder) if may_take else None
            if block_ids is None:
                self.ledger.release(trunk.block_ids, Holder.LEASED)
                raise self._kv_full(request, missing)
            self.shares.taken(request)
            group.num_owned = len(trunk.block_ids)
            trunk.block_ids += block_ids
            self._register(group)
            if not fetches:
                self._wait(group)
            return Acceptance(self.ledger.refs(trunk.block_ids), group.num_cached_tokens)

    def fetching(self, key: Key) -> None:
        """Bytes may land in the blocks of a held prefill from here on, until `fetch_settled`."""
        with self.ledger.lock:
            self._fetching(key).fetch_settled = False

    def compute_rest(self, key: Key) -> None:
        """What no fetch has brought is computed here: of an admitted prompt, or of a held prefill, whose fetch has
        settled. Refusal: kv_full. LookupError when the key has ended."""
        with self.ledger.lock:
            group = self._fetching(key)
            if group.is_held:
                block_ids = group.trunk.block_ids
                self.ledger.move(block_ids[group.num_owned :], Holder.FETCHING, Holder.LEASED)
                group.num_owned = len(block_ids)
                group.num_cached_tokens = group.trunk.num_computed  # what was pulled is not computed either
            else:
                self._drop_unverified(group)
                group.accepted_at = time.monotonic()
            group.state = State.WAITING
            self._wait(group)

    def offer(self, key: Key, span_hashes: tuple[bytes, ...]) -> Acceptance:
        """A lease on the cached blocks of these spans, as many as are here; none: then no key is registered."""
        with self.ledger.lock:
            if key in self.groups:
                raise ValueError(f"{key} is in use")
            block_ids = self.ledger.find(span_hashes, len(span_hashes) * SPAN_TOKENS + 1)
            if not block_ids or not self.ledger.share(block_ids, Holder.LEASED):
                return Acceptance((), 0)
            request = Request(key, (), 0, SamplingParams(), max_tokens=0)
            group = Group(request, Holder.LEASED, State.HELD)
            group.trunk.block_ids = block_ids
            self._register(group)
            return Acceptance(self.ledger.refs(block_ids), len(block_ids) * self.layout.block_size)

    def release_lease(self, key: Key) -> None:
        """The taker has all it wanted, or never will: a held prefill ends, a running one is cancelled. Idempotent."""
        with self.ledger.lock:
            group = self.groups.get(key)
            if group is None or not group.is_held:
                return
            if group.state is State.HELD:
                self.inbox.post(self.end(group))
            else:
                self.inbox.post(Stop(key, group.arrival))

    # ---- parking: without a reader nothing is computed ----

    def park(self, key: Key) -> None:
        """Stepping stops before the next step. Idempotent; nothing for a key that the loop does not have."""
        with self.ledger.lock:
            if (group := self.groups.get(key)) is not None:
                self.inbox.post(Park(key, group.arrival))

    def resume(self, key: Key, deadline: float) -> None:
        """A key that was told to park goes on, until `deadline` now. Raises LookupError when it has ended."""
        with self.ledger.lock:
            group = self.groups.get(key)
            if group is None:
                raise LookupError(f"{key} has ended")
            group.deadline = deadline
            self.inbox.post(Resume(key, group.arrival))

    def parked(self, group: Group) -> None:
        """The loop has let go of a group: all its blocks go back, whole units of them stay in the cache."""
        with self.ledger.lock:
            for seq in group.live:
                self.give_back(seq)
            group.state = State.PARKED
            self._num_choices -= group.request.sampling.n

    def resumed(self, group: Group) -> bool:
        """The loop takes a parked group up again, whoever else is there: it waits for blocks like one that was
        preempted. False: it had not parked, or it has ended."""
        with self.ledger.lock:
            self.groups.expect(group)
            if group.state is not State.PARKED:
                return False
            group.state = State.RUNNING
            self._num_choices += group.request.sampling.n
            return True

    # ---- endings ----

    def cancel(self, key: Key) -> None:
        """Any state, idempotent. A group of the loop ends between steps, any other now."""
        with self.ledger.lock:
            group = self.groups.get(key)
            if group is None:
                return
            self.inbox.post(Stop(key, group.arrival) if group.in_loop else self.end(group, "cancelled"))

    def end(self, group: Group, error: str = "", message: str = "") -> RequestEnded | None:
        """The one place where a key ends: all it holds goes back. The caller gives the answer out; None: it has ended
        already. Idempotent."""
        with self.ledger.lock:
            if self.groups.get(group.key) is not group:
                return None
            del self.groups[group.key]
            self.num_waiting_tokens -= group.num_waiting_tokens
            if group.state is State.FETCHING:
                self._give_back_fetching(group)
            for seq in group.live:
                self.give_back(seq)
            group.live = []
            if not group.is_held and group.state is not State.PARKED:
                self._num_choices -= group.request.sampling.n
            group.state = State.FINISHED
            return RequestEnded(group.key, error, message, group.report())

    # ---- shared with the loop ----

    def give_back(self, seq: Sequence) -> None:
        """A sequence's blocks and promise; whole units of it stay in the cache."""
        with self.ledger.lock:
            self.ledger.release(seq.block_ids, seq.group.holder)
            self.ledger.unreserve(seq.reserve)
            seq.block_ids, seq.reserve, seq.num_computed, seq.num_sealed, seq.block_table = [], 0, 0, 0, None

    def seal(self, seq: Sequence) -> None:
        """Names the units whose KV is written and has passed (or is verified)."""
        cache = self.ledger.cache
        num_units = seq.num_computed // cache.unit_tokens
        if num_units == seq.num_sealed or not seq.group.is_named:
            return
        seq.name_spans(num_units * cache.unit_tokens)
        with self.ledger.lock:
            for unit in range(seq.num_sealed, num_units):
                spans = seq.hashes[unit * cache.spans_per_unit : (unit + 1) * cache.spans_per_unit]
                block_ids = seq.block_ids[unit * cache.blocks_per_unit : (unit + 1) * cache.blocks_per_unit]
                self.ledger.seal(tuple(spans), tuple(block_ids))
        seq.num_sealed = num_units

    def launched(self, group: Group, now: float) -> None:
        """The group's first chunk goes out."""
        with self.ledger.lock:
            self.num_waiting_tokens -= group.num_waiting_tokens
            group.num_waiting_tokens = 0
            group.launched_at = now
            group.state = State.RUNNING

    def hold(self, group: Group) -> None:
        """A held prefill is complete: from here on its blocks wait for release_lease alone."""
        with self.ledger.lock:
            group.state = State.HELD

    def holdings(self) -> list[tuple[Holder, list[int]]]:
        """Who holds which blocks, as the keys themselves have it: to compare with the ledger."""
        held = [(Holder.QUARANTINED, block_ids) for block_ids in self._quarantined.values()]
        for group in self.groups.values():
            for seq in group.live:
                num_owned = group.num_owned if group.state is State.FETCHING else len(seq.block_ids)
                held.append((group.holder, seq.block_ids[:num_owned]))
                held.append((Holder.FETCHING, seq.block_ids[num_owned:]))
        return held

    def num_promised(self) -> int:
        return sum(seq.reserve for group in self.groups.values() for seq in group.live)

    def observe(self, num_output: int) -> None:
        """An output that ended by itself was this long: what growth is reserved from."""
        self._expected_output += AVERAGE_WEIGHT * (num_output - self._expected_output)

    def expected_left(self, request: Request, num_output: int) -> int:
        """Tokens that are still to come behind `num_output`, as outputs went lately; at least one."""
        return max(1, min(request.max_tokens - num_output, round(self._expected_output)))

    # ---- private ----

    def _check(self, request: Request, longest: int, num_choices: int) -> None:
        """Refuses what could never run here to its end: `longest` tokens of a sequence, and behind the prompt a block
        of its own for each choice. So no choice is ever ended by this engine's length; gateways ask by the same rule
        (gateway/routing/routing.py, `can_decode` and `can_prefill`)."""
        num_tokens = len(request.token_ids)
        if request.key in self.groups:
            raise ValueError(f"{request.key} is in use")
        num_blocks = self.layout.num_blocks(num_tokens) + (num_choices - 1) * bool(num_tokens % self.layout.block_size)
        if longest > self.config.max_model_len or num_blocks > self.ledger.num_blocks:
            raise Refusal("too_long", retry_after_s=0.0)

    def _kv_full(self, request: Request, num_blocks: int) -> Refusal:
        """Who is owed them may ask again soon."""
        if not self.shares.refused(request, num_blocks):
            return Refusal("kv_full")
        self.inbox.ring()
        return Refusal("kv_full", retry_after_s=0.02)

    def _pin(self, trunk: Sequence) -> None:
        """Takes the cached prefix. Refusal where its blocks are promised to others."""
        block_ids = self.ledger.find(trunk.hashes, trunk.num_tokens)
        if not self.ledger.share(block_ids, trunk.group.holder):
            raise self._kv_full(trunk.group.request, self.layout.num_blocks(trunk.num_tokens))
        trunk.block_ids = block_ids
        trunk.num_computed = trunk.group.num_cached_tokens = len(block_ids) * self.layout.block_size
        trunk.num_sealed = trunk.num_computed // self.ledger.cache.unit_tokens

    def _growth(self, request: Request) -> int:
        """Blocks beyond the prompt's: all choices as long as outputs were lately, and a tail for each but the first."""
        num_tokens, n = len(request.token_ids), request.sampling.n
        left = self.expected_left(request, num_tokens - request.num_prompt_tokens)
        growth = self.layout.num_blocks(num_tokens + left) - self.layout.num_blocks(num_tokens)
        return n * growth + (n - 1) * bool(num_tokens % self.layout.block_size)

    def _register(self, group: Group) -> None:
        self.groups[group.key] = group
        self.groups.expect(group)

    def _wait(self, group: Group) -> None:
        """Into the loop's queue."""
        group.num_waiting_tokens = group.trunk.remaining
        self.num_waiting_tokens += group.num_waiting_tokens
        self.inbox.post(Enter(group.key, group.arrival))

    def _fetching(self, key: Key) -> Group:
        group = self.groups.get(key)
        if group is None or group.state is not State.FETCHING:
            raise LookupError(f"{key} is not admitted here, or ended")
        return group

    def _drop_unverified(self, group: Group) -> None:
        """What a fetch left unfinished goes back and is promised again; what it brought stays."""
        trunk = group.trunk
        num_missing = len(trunk.block_ids) - group.num_owned
        self._give_back_fetching(group)
        if not self.ledger.reserve(num_missing):
            raise Refusal("kv_full")
        trunk.reserve += num_missing
        trunk.num_computed = min(trunk.num_computed, trunk.num_tokens - 1)

    def _give_back_fetching(self, group: Group) -> None:
        """Blocks that a fetch may still write into are quarantined until it has settled."""
        trunk = group.trunk
        fetching, trunk.block_ids = trunk.block_ids[group.num_owned :], trunk.block_ids[: group.num_owned]
        if group.fetch_settled:
            self.ledger.release(fetching, Holder.FETCHING)
        elif fetching:
            self.ledger.move(fetching, Holder.FETCHING, Holder.QUARANTINED)
            self._quarantined.setdefault(group.key, []).extend(fetching)
