"""The states of groups: `happen` looks an event up in TABLE, runs the action it names and sets the state, here alone.

A group in the loop (waiting or running) ends between steps, by the loop: other threads only post to it. Any other is
ended by any thread at any time, so who looks one up does what follows under the same lock.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from baton.engine.core.request import FirstToken, Key, Refusal, Request, RequestEnded
from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.sampling.grammars import Grammars
from baton.engine.schedule.groups import Groups
from baton.engine.schedule.inbox import Enter, Inbox, Start, Stop
from baton.engine.schedule.scheduler import Scheduler
from baton.engine.schedule.sequence import Group
from baton.engine.schedule.states import GroupEvent, GroupState
from baton.protocol import KV_FULL
from kvtransfer.layout import KVLayout


class Ending(NamedTuple):
    """The end of a group, in the words of RequestEnded."""

    error: str = ""
    message: str = ""


class GroupLifecycle:
    """Every live group of one engine, and what its events do. Thread-safe: `happen` takes the ledger's lock."""

    def __init__(
        self, layout: KVLayout, ledger: Ledger, inbox: Inbox, groups: Groups, scheduler: Scheduler,
        grammars: Grammars | None,
    ):  # fmt: skip
        """Without `grammars` no group has a constraint."""
        self.layout = layout
        self.ledger = ledger
        self.inbox = inbox
        self.groups = groups
        self.scheduler = scheduler
        self.grammars = grammars
        self.num_waiting_tokens = 0  # of prompts that wait for their first chunk
        self.num_choices = 0  # admitted, and neither parked nor ended
        self._quarantined: dict[Key, list[int]] = {}
        self._quarantined_states: dict[Key, list[int]] = {}

    def happen(self, group: Group, event: GroupEvent, subject: Any = None) -> RequestEnded | None:
        """Let one event happen to a group. `subject` is what the event brings, see the actions. Returns the group's
        end, if this was it: the caller gives it out.

        What an action raises is raised, and the state stays: LookupError for what comes too late, Refusal, ValueError.
        """
        with self.ledger.lock:
            action, state = TABLE[group.state, event]
            ended = action(self, group, subject)
            group.state = state
            return ended

    def fetch_settled(self, key: Key) -> None:
        """Give back the quarantined blocks of a key, dead or alive: no byte of its fetch can land any more."""
        with self.ledger.lock:
            self.ledger.release(self._quarantined.pop(key, []), Holder.QUARANTINED)
            if self.ledger.states is not None:
                self.ledger.states.release(self._quarantined_states.pop(key, []), Holder.QUARANTINED)
            if (group := self.groups.get(key)) is not None:
                group.fetch_settled = True

    def num_to_grow(self, request: Request) -> int:
        """Return the blocks beyond the prompt's that are promised: all choices as long as outputs were lately, and a
        tail for each but the first."""
        num_tokens, n = len(request.token_ids), request.sampling.n
        left = self.scheduler.lengths.expected_left(request, num_tokens - request.num_prompt_tokens)
        growth = self.layout.num_blocks(num_tokens + left) - self.layout.num_blocks(num_tokens)
        return n * growth + (n - 1) * bool(num_tokens % self.layout.block_size)

    def holdings(self) -> list[tuple[Holder, list[int]]]:
        """Return the holders of blocks by the keys' own records, to compare with the ledger."""
        held = [(Holder.QUARANTINED, block_ids) for block_ids in self._quarantined.values()]
        for group in self.groups.values():
            for seq in group.live:
                block_ids, num_fetching = seq.held(self.ledger.window)[0], 0
                if group.state is GroupState.FETCHING:
                    num_fetching = len(seq.block_ids) - group.num_owned
                num_owned = len(block_ids) - num_fetching
                held += [(group.holder, block_ids[:num_owned]), (Holder.FETCHING, block_ids[num_owned:])]
        return held

    def seen(self) -> list[list[int]]:
        """Return the blocks that each holds all of, where layers with a window have parts of them."""
        return [*self._quarantined.values(), *(seq.seen_ids for group in self.groups.values() for seq in group.live)]

    def state_holdings(self) -> list[tuple[Holder, list[int]]]:
        """Return the holders of state blocks, as `holdings` does those of others."""
        held = [(Holder.QUARANTINED, block_ids) for block_ids in self._quarantined_states.values()]
        for group in self.groups.values():
            for seq in group.live:
                held += seq.recurrent.held(group.holder)
        return held

    def num_states_promised(self) -> int:
        """Return the state blocks that are promised to the sequences of all groups."""
        return sum(seq.recurrent.reserve for group in self.groups.values() for seq in group.live)

    def num_promised(self) -> int:
        """Return the blocks that the ledger has promised to the sequences of all groups."""
        return sum(seq.reserve for group in self.groups.values() for seq in group.live)

    # ---- actions of no consequence ----

    def ignore(self, group: Group, subject: object) -> None:
        """Do nothing: the event has no meaning in this state, or has happened already."""

    def refuse_late(self, group: Group, subject: object) -> None:
        """Raise LookupError: the key is not admitted here, or has ended."""
        raise LookupError(f"{group.key} is not admitted here, or ended")

    def refuse_in_use(self, group: Group, subject: object) -> None:
        """Raise ValueError: the key is in use."""
        raise ValueError(f"{group.key} is in use")

    # ---- opening ----

    def register(self, group: Group, subject: object) -> None:
        self.groups[group.key] = group
        self.groups.add_deadline(group)
        if self.grammars is not None and group.request.constraint is not None:
            group.grammar = self.grammars.compile(group.request.constraint, group.tenant)

    def admit(self, group: Group, subject: object) -> None:
        self.num_choices += group.request.sampling.n
        self.register(group, subject)

    def accept(self, group: Group, subject: object) -> None:
        self.register(group, subject)
        self._wait(group)

    # ---- fetching ----

    def begin_fetch(self, group: Group, subject: object) -> None:
        """Let bytes land. Raises LookupError where a state has come already, which another one would go through."""
        if group.trunk.recurrent.is_ready:
            raise LookupError(f"{group.key} has a state, behind which it is computed here")
        group.fetch_settled = False

    def skip(self, group: Group, num_tokens: int) -> None:
        """Begin behind what no token behind `num_tokens` sees, in whole units, before anything is set aside. A prompt
        that a taker will read, or of whose tokens something is asked, or whose blocks stay, is fetched whole."""
        trunk, unit = group.trunk, self.ledger.cache.blocks_per_unit
        num_outside = self.ledger.window.num_outside(min(num_tokens, trunk.num_tokens - 1)) // unit * unit
        if group.is_for_taker or not group.reads_cache or len(trunk.block_ids) > group.num_owned:
            return
        if not self.ledger.window.is_part and num_outside * self.layout.block_size > trunk.num_computed:
            trunk.skip(num_outside, self.ledger)
            group.num_owned = num_outside

    def set_aside(self, group: Group, upto_token: int) -> None:
        """Take blocks for tokens [0, upto_token): the cached ones, then new ones, held `fetching`. Raises Refusal
        (kv_full) where too few are left, ValueError beyond the prompt."""
        trunk = group.trunk
        if upto_token > trunk.num_tokens:
            raise ValueError(f"{group.key}: set_aside up to {upto_token} of {trunk.num_tokens} tokens")
        if not trunk.recurrent.take(self.ledger.states, Holder.FETCHING):
            raise Refusal(KV_FULL)
        if (missing := self.layout.num_blocks(upto_token) - len(trunk.block_ids)) > 0:
            block_ids = self.ledger.allocate(missing, Holder.FETCHING, reserved=min(missing, trunk.reserve))
            if block_ids is None:
                raise Refusal(KV_FULL)
            trunk.reserve -= min(missing, trunk.reserve)
            trunk.block_ids += block_ids
            trunk.pass_over(trunk.num_outside, self.ledger.window)
            group.fetch_settled = False

    def verify(self, group: Group, upto_token: int) -> None:
        """Confirm tokens [0, upto_token): fetching -> the group's holder, whole units enter the prefix cache. Raises
        ValueError beyond the blocks set aside."""
        trunk = group.trunk
        whole = upto_token >= trunk.num_tokens
        num_owned = self.layout.num_blocks(upto_token) if whole else upto_token // self.layout.block_size
        if num_owned > len(trunk.block_ids) or upto_token > trunk.num_tokens:
            raise ValueError(f"{group.key}: verified up to {upto_token}, {len(trunk.block_ids)} blocks were set aside")
        if self.ledger.states is not None:
            if not whole and upto_token % self.layout.block_size:
                return  # the state stands where no block ends: it goes on with nothing
            trunk.recurrent.note_verified(self.ledger.states, group.holder)
        if num_owned > group.num_owned:
            self.ledger.move(trunk.block_ids[group.num_owned : num_owned], Holder.FETCHING, group.holder)
            group.num_owned = num_owned
            trunk.num_computed = upto_token if whole else num_owned * self.layout.block_size
            trunk.seal(self.ledger)
            if self.ledger.window.is_part:
                trunk.leave_window(self.ledger)

    def start(self, group: Group, first_tokens: tuple[FirstToken, ...]) -> None:
        """Let a fetched prompt decode from its first tokens. Raises ValueError before its last block is verified."""
        if group.trunk.num_computed < group.trunk.num_tokens:
            raise ValueError(f"{group.key}: start before the last block was verified")
        self._lower_promise(group, self.num_to_grow(group.request))
        group.note_first_tokens()
        self.inbox.post(Start(group.key, group.arrival, tuple(first_tokens)))

    def compute_rest(self, group: Group, subject: object) -> None:
        """Compute here what no fetch has brought. Raises Refusal (kv_full) where too few blocks are left, ValueError
        where something is asked of tokens that were fetched."""
        if group.trunk.num_computed and not group.reads_cache:
            raise ValueError(
                f"{group.key}: prompt_logprobs and pooling are of tokens that are read here, and some were fetched"
            )
        if group.is_for_taker:
            block_ids = group.trunk.block_ids
            self.ledger.move(block_ids[group.num_owned :], Holder.FETCHING, Holder.LEASED)
            group.num_owned = len(block_ids)
            group.trunk.recurrent.settle(self.ledger.states, Holder.LEASED)
        else:
            self._drop_unverified(group)
            self._lower_promise(group, self.ledger.window.most_blocks(group.trunk.reserve, group.request.sampling.n))
            group.accepted_at = time.monotonic()
        group.num_cached_tokens = group.trunk.num_computed  # what was pulled is not computed either
        self._wait(group)

    # ---- in the loop ----

    def add_trunk(self, group: Group, subject: object) -> None:
        self.scheduler.add(group.trunk)

    def launch(self, group: Group, now: float) -> None:
        """The group's first chunk goes out at `now` (time.monotonic())."""
        self.num_waiting_tokens -= group.num_waiting_tokens
        group.num_waiting_tokens = 0
        group.launched_at = now

    def hold(self, group: Group, subject: object) -> None:
        """A held prefill is complete: from here on its blocks wait for release_lease alone."""
        self.scheduler.remove(group.trunk)

    def park(self, group: Group, subject: object) -> None:
        """All its blocks go back, whole units of them stay in the cache."""
        for seq in group.live:
            self.scheduler.remove(seq)
            seq.give_back(self.ledger)
        self.num_choices -= group.request.sampling.n

    def resume(self, group: Group, subject: object) -> None:
        """Into the queues again, whatever else is there: it waits for blocks like one that was preempted."""
        self.groups.add_deadline(group)
        self.num_choices += group.request.sampling.n
        for seq in group.live:
            self.scheduler.add(seq)

    def refile_deadline(self, group: Group, subject: object) -> None:
        """File its deadline again, which a resume has changed: it was to park, and has not."""
        self.groups.add_deadline(group)

    def post_stop(self, group: Group, subject: object) -> None:
        self.inbox.post(Stop(group.key, group.arrival))

    # ---- endings ----

    def end(self, group: Group, ending: Ending) -> RequestEnded:
        """The one place where a key ends: all it holds goes back."""
        del self.groups[group.key]
        if self.grammars is not None and group.grammar is not None:
            self.grammars.leave(group.grammar, group.tenant)
        self.num_waiting_tokens -= group.num_waiting_tokens
        for seq in group.live:
            seq.give_back(self.ledger)
        group.live = []
        return RequestEnded(group.key, ending.error, ending.message, group.report())

    def end_in_loop(self, group: Group, ending: Ending) -> RequestEnded:
        for seq in group.live:
            self.scheduler.remove(seq)
        self._drop_choices(group)
        return self.end(group, ending)

    def end_fetching(self, group: Group, ending: Ending) -> RequestEnded:
        self._give_back_fetching(group)
        self._drop_choices(group)
        return self.end(group, ending)

    # ---- private ----

    def _wait(self, group: Group) -> None:
        """Into the loop's queue."""
        group.num_waiting_tokens = group.trunk.remaining
        self.num_waiting_tokens += group.num_waiting_tokens
        self.inbox.post(Enter(group.key, group.arrival))

    def _drop_choices(self, group: Group) -> None:
        if not group.is_for_taker:
            self.num_choices -= group.request.sampling.n

    def _drop_unverified(self, group: Group) -> None:
        """Give back the blocks of an unfinished fetch and promise them again; verified ones stay."""
        trunk = group.trunk
        num_states = trunk.recurrent.num_own
        num_missing = self.ledger.window.most_blocks(len(trunk.block_ids) - group.num_owned)
        self._give_back_fetching(group)
        cache = self.ledger.cache
        is_past = trunk.recurrent.is_ready and trunk.num_computed >= trunk.num_tokens
        # The last token is computed again: where its unit has a name, others may look at it, and all of it is read
        # anew.
        is_named = trunk.num_sealed * cache.unit_tokens >= trunk.num_tokens
        again = cache.unit_tokens if is_named else 1
        trunk.num_computed = min(trunk.num_computed, trunk.num_tokens - again)
        is_inside = self.ledger.window.num_outside(trunk.num_computed) >= trunk.num_outside
        # A state stands behind the last token, or what the next token sees was skipped: from the cache on.
        if is_past or not is_inside:
            num_missing = self.ledger.window.most_blocks(self.layout.num_blocks(trunk.num_tokens))
            group.num_owned = 0
            trunk.give_back(self.ledger)
        elif is_named:
            num_missing += cache.blocks_per_unit
            group.num_owned -= cache.blocks_per_unit
            self.ledger.release(trunk.block_ids[group.num_owned :], group.holder)
            trunk.block_ids, trunk.num_sealed = trunk.block_ids[: group.num_owned], trunk.num_sealed - 1
        promised = trunk.recurrent.promise(self.ledger.states, num_states - trunk.recurrent.num_own)
        if not (promised and self.ledger.reserve(num_missing)):
            raise Refusal(KV_FULL)
        trunk.reserve += num_missing

    def _lower_promise(self, group: Group, most: int) -> None:
        """To what it needs from here on: to be fetched or, where layers see a window, to be read may take more."""
        num_left = min(group.trunk.reserve, most)
        self.ledger.unreserve(group.trunk.reserve - num_left)
        group.trunk.reserve = num_left

    def _give_back_fetching(self, group: Group) -> None:
        """Blocks that a fetch may still write into are quarantined until it has settled."""
        trunk = group.trunk
        fetching, trunk.block_ids = trunk.block_ids[group.num_owned :], trunk.block_ids[: group.num_owned]
        if group.fetch_settled:
            self.ledger.release(fetching, Holder.FETCHING)
        elif fetching:
            self.ledger.move(fetching, Holder.FETCHING, Holder.QUARANTINED)
            self._quarantined.setdefault(group.key, []).extend(fetching)
        if (states := self.ledger.states) is not None and (left := trunk.recurrent.take_fetching()):
            if group.fetch_settled:
                states.release(left, Holder.FETCHING)
            else:
                states.move(left, Holder.FETCHING, Holder.QUARANTINED)
                self._quarantined_states.setdefault(group.key, []).extend(left)


class GroupTransition(NamedTuple):
    """The group is in `state` once `action` has returned."""

    action: Callable[[GroupLifecycle, Group, Any], RequestEnded | None]
    state: GroupState


def _table() -> dict[tuple[GroupState, GroupEvent], GroupTransition]:
    s, e, act, to = GroupState, GroupEvent, GroupLifecycle, GroupTransition
    table = {(state, event): to(act.ignore, state) for state in s for event in e}
    for state in s:
        for event in (e.ADMIT, e.ACCEPT, e.ACCEPT_PREFIX, e.OFFER):
            table[state, event] = to(act.refuse_in_use, state)
        for event in (e.FETCH, e.SET_ASIDE, e.VERIFY, e.START, e.COMPUTE_REST):
            table[state, event] = to(act.refuse_late, state)
    for state in (s.FETCHING, s.WAITING, s.RUNNING, s.HELD):
        table[state, e.RESUME] = to(act.refile_deadline, state)
    for event in (e.CANCEL, e.DEADLINE, e.END):
        table[s.FETCHING, event] = to(act.end_fetching, s.FINISHED)
    for state in (s.WAITING, s.RUNNING):
        table[state, e.RELEASE_LEASE] = table[state, e.CANCEL] = to(act.post_stop, state)
        table[state, e.DEADLINE] = table[state, e.END] = to(act.end_in_loop, s.FINISHED)
    for state in (s.HELD, s.PARKED):  # a lease has a clock of its own, and what is parked waits for a reader
        table[state, e.CANCEL] = table[state, e.END] = to(act.end, s.FINISHED)
    return table | {
        (s.NEW, e.ADMIT): to(act.admit, s.FETCHING),
        (s.NEW, e.ACCEPT): to(act.accept, s.WAITING),
        (s.NEW, e.ACCEPT_PREFIX): to(act.register, s.FETCHING),
        (s.NEW, e.OFFER): to(act.register, s.HELD),
        (s.FETCHING, e.FETCH): to(act.begin_fetch, s.FETCHING),
        (s.FETCHING, e.SKIP): to(act.skip, s.FETCHING),
        (s.FETCHING, e.SET_ASIDE): to(act.set_aside, s.FETCHING),
        (s.FETCHING, e.VERIFY): to(act.verify, s.FETCHING),
        (s.FETCHING, e.START): to(act.start, s.WAITING),
        (s.FETCHING, e.COMPUTE_REST): to(act.compute_rest, s.WAITING),
        (s.FETCHING, e.RELEASE_LEASE): to(act.post_stop, s.FETCHING),
        (s.WAITING, e.ENTER): to(act.add_trunk, s.WAITING),
        (s.WAITING, e.JOIN): to(act.add_trunk, s.RUNNING),
        (s.WAITING, e.LAUNCH): to(act.launch, s.RUNNING),
        (s.RUNNING, e.HOLD): to(act.hold, s.HELD),
        (s.RUNNING, e.PARK): to(act.park, s.PARKED),
        (s.PARKED, e.RESUME): to(act.resume, s.RUNNING),
        (s.HELD, e.RELEASE_LEASE): to(act.end, s.FINISHED),
    }


TABLE = _table()
