"""The actions of a group's events: functions of the context, the group, and the event's payload.

lifecycle.py says which action an event runs in which state, and sets the state that follows.
"""

import time
from typing import NamedTuple

from baton.engine.core.request import FirstToken, Refusal, RequestEnded
from baton.engine.kv.ledger import Holder
from baton.engine.schedule.groups import GroupContext
from baton.engine.schedule.inbox import Enter, Start, Stop
from baton.engine.schedule.sequence import SequenceGroup
from baton.protocol import KV_FULL


class Ending(NamedTuple):
    """Why a group ends: `error` and `message` as in RequestEnded."""

    error: str = ""
    message: str = ""


# ---- events that change nothing ----


def ignore(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Do nothing: the event does not apply in this state, or came before."""


def refuse_late(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Raise LookupError: the key is not admitted here, or has ended."""
    raise LookupError(f"{group.key} is not admitted here, or ended")


def refuse_in_use(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Raise ValueError: the key is in use."""
    raise ValueError(f"{group.key} is in use")


# ---- opening ----


def register(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Register the group under its key, and have the grammar of its constraint compiled."""
    context.groups[group.key] = group
    context.groups.add_deadline(group)
    if context.grammars is not None and group.request.constraint is not None:
        group.grammar = context.grammars.compile(group.request.constraint, group.tenant)


def admit(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Register a group that is admitted with a credit."""
    context.num_choices += group.request.sampling.n
    register(context, group, payload)


def accept(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Register a prefill for a taker, and post it to the loop."""
    register(context, group, payload)
    _wait(context, group)


# ---- fetching ----


def begin_fetch(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Allow bytes to land. Raises LookupError if the group has its recurrent state already, which the fetch would
    overwrite."""
    if group.trunk.recurrent.is_ready:
        raise LookupError(f"{group.key} has a state, behind which it is computed here")
    group.fetch_settled = False


def skip(context: GroupContext, group: SequenceGroup, num_tokens: int) -> None:
    """Begin the fetch of [0, num_tokens) after the blocks outside every window, in whole cache units.

    Does nothing after the first `set_aside`, or for a prompt that is fetched whole: one for a taker, one that may
    not read the cache, or one whose blocks stay outside windows.
    """
    trunk, unit = group.trunk, context.ledger.cache.blocks_per_unit
    num_skipped = context.ledger.window.num_skipped_blocks(min(num_tokens, trunk.num_tokens - 1)) // unit * unit
    if group.is_for_taker or not group.reads_cache or len(trunk.blocks.ids) > group.num_owned:
        return
    if not context.ledger.window.keeps_skipped and num_skipped * context.layout.block_size > trunk.num_computed:
        trunk.begin_after_skipped(num_skipped, context.ledger)
        group.num_owned = num_skipped


def set_aside(context: GroupContext, group: SequenceGroup, upto_token: int) -> None:
    """Allocate the missing blocks for tokens [0, upto_token), held as `fetching`.

    Raises Refusal (kv_full) if too few are available, ValueError beyond the prompt.
    """
    trunk = group.trunk
    if upto_token > trunk.num_tokens:
        raise ValueError(f"{group.key}: set_aside up to {upto_token} of {trunk.num_tokens} tokens")
    if not trunk.recurrent.allocate(context.ledger.states, Holder.FETCHING):
        raise Refusal(KV_FULL)
    if (missing := trunk.blocks.num_lacking(upto_token, context.layout)) > 0:
        if not trunk.blocks.allocate(missing, context.ledger, Holder.FETCHING):
            raise Refusal(KV_FULL)
        trunk.blocks.fill_skipped(trunk.blocks.num_skipped, context.ledger.window)
        group.fetch_settled = False


def verify(context: GroupContext, group: SequenceGroup, upto_token: int) -> None:
    """Confirm tokens [0, upto_token): their blocks pass to the group's holder, and whole units enter the prefix
    cache.

    Raises ValueError beyond the blocks set aside.
    """
    trunk = group.trunk
    whole = upto_token >= trunk.num_tokens
    num_owned = context.layout.num_blocks(upto_token) if whole else upto_token // context.layout.block_size
    if num_owned > len(trunk.blocks.ids) or upto_token > trunk.num_tokens:
        raise ValueError(f"{group.key}: verified up to {upto_token}, {len(trunk.blocks.ids)} blocks were set aside")
    if context.ledger.states is not None:
        if not whole and upto_token % context.layout.block_size:
            return  # the state stands inside a block, so nothing of it can be continued from
        trunk.recurrent.note_verified(context.ledger.states, group.holder)
    if num_owned > group.num_owned:
        context.ledger.move(trunk.blocks.ids[group.num_owned : num_owned], Holder.FETCHING, group.holder)
        group.num_owned = num_owned
        trunk.num_computed = upto_token if whole else num_owned * context.layout.block_size
        trunk.seal(context.ledger)
        if context.ledger.window.keeps_skipped:
            trunk.retire_outside_window(context.ledger)


def start(context: GroupContext, group: SequenceGroup, first_tokens: tuple[FirstToken, ...]) -> None:
    """Post a fetched prompt to the loop, to decode from its first tokens. ValueError before its last block is
    verified."""
    if group.trunk.num_computed < group.trunk.num_tokens:
        raise ValueError(f"{group.key}: start before the last block was verified")
    _lower_promise(context, group, context.num_to_grow(group.request))
    group.note_first_tokens()
    context.inbox.post(Start(group.key, group.arrival, tuple(first_tokens)))


def compute_rest(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Post a prompt to the loop, to compute the tokens that were not fetched.

    Raises Refusal (kv_full) if too few blocks are available, ValueError if tokens were fetched whose outputs are
    asked for.
    """
    if group.trunk.num_computed and not group.reads_cache:
        raise ValueError(
            f"{group.key}: prompt_logprobs and pooling are of tokens that are read here, and some were fetched"
        )
    if group.is_for_taker:
        block_ids = group.trunk.blocks.ids
        context.ledger.move(block_ids[group.num_owned :], Holder.FETCHING, Holder.LEASED)
        group.num_owned = len(block_ids)
        group.trunk.recurrent.settle(context.ledger.states, Holder.LEASED)
    else:
        _drop_unverified(context, group)
        _lower_promise(
            context, group, context.ledger.window.max_blocks(group.trunk.blocks.reserve, group.request.sampling.n)
        )
        group.accepted_at = time.monotonic()
    group.num_cached_tokens = group.trunk.num_computed  # fetched tokens count as cached
    _wait(context, group)


# ---- in the loop ----


def add_trunk(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Add the group's first sequence to the scheduler."""
    context.scheduler.add(group.trunk)


def launch(context: GroupContext, group: SequenceGroup, now: float) -> None:
    """Note that the group's first chunk is launched at `now` (time.monotonic())."""
    context.num_waiting_tokens -= group.num_waiting_tokens
    group.num_waiting_tokens = 0
    group.launched_at = now


def hold(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Take a complete held prefill out of the scheduler; only release_lease ends it from now on."""
    context.scheduler.remove(group.trunk)


def park(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Take the group out of the scheduler and release its blocks; whole units of them stay in the cache."""
    for seq in group.live:
        context.scheduler.remove(seq)
        seq.give_back(context.ledger)
    context.num_choices -= group.request.sampling.n


def resume(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Put the group back into the scheduler's queues, where it waits for blocks like a preempted one."""
    context.groups.add_deadline(group)
    context.num_choices += group.request.sampling.n
    for seq in group.live:
        context.scheduler.add(seq)


def refile_deadline(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Add the deadline that a resume has changed: the group was to be parked, and was not yet."""
    context.groups.add_deadline(group)


def post_stop(context: GroupContext, group: SequenceGroup, payload: object) -> None:
    """Have the loop end the group between steps."""
    context.inbox.post(Stop(group.key, group.arrival))


# ---- endings ----


def end(context: GroupContext, group: SequenceGroup, ending: Ending) -> RequestEnded:
    """End a group: forget its key and release all that it holds. No key ends anywhere else."""
    del context.groups[group.key]
    if context.grammars is not None and group.grammar is not None:
        context.grammars.leave(group.grammar, group.tenant)
    context.num_waiting_tokens -= group.num_waiting_tokens
    for seq in group.live:
        seq.give_back(context.ledger)
    group.live = []
    return RequestEnded(group.key, ending.error, ending.message, group.report())


def end_in_loop(context: GroupContext, group: SequenceGroup, ending: Ending) -> RequestEnded:
    """End a group of the loop, between steps."""
    for seq in group.live:
        context.scheduler.remove(seq)
    _drop_choices(context, group)
    return end(context, group, ending)


def end_fetching(context: GroupContext, group: SequenceGroup, ending: Ending) -> RequestEnded:
    """End a group whose prompt is being fetched."""
    _give_back_fetching(context, group)
    _drop_choices(context, group)
    return end(context, group, ending)


# ---- parts of actions ----


def _wait(context: GroupContext, group: SequenceGroup) -> None:
    """Post the group to the loop, to be computed."""
    group.num_waiting_tokens = group.trunk.remaining
    context.num_waiting_tokens += group.num_waiting_tokens
    context.inbox.post(Enter(group.key, group.arrival))


def _drop_choices(context: GroupContext, group: SequenceGroup) -> None:
    if not group.is_for_taker:
        context.num_choices -= group.request.sampling.n


def _drop_unverified(context: GroupContext, group: SequenceGroup) -> None:
    """Release the unverified blocks of a fetch and promise as many again. Refusal (kv_full) if they were taken
    meanwhile."""
    trunk = group.trunk
    num_states = trunk.recurrent.num_own
    num_missing = context.ledger.window.max_blocks(len(trunk.blocks.ids) - group.num_owned)
    _give_back_fetching(context, group)
    cache = context.ledger.cache
    is_past = trunk.recurrent.is_ready and trunk.num_computed >= trunk.num_tokens
    # The last token is computed again. If its unit is named in the cache, others may read it, so the whole unit is
    # computed again in blocks of its own.
    is_named = trunk.num_sealed * cache.unit_tokens >= trunk.num_tokens
    again = cache.unit_tokens if is_named else 1
    trunk.num_computed = min(trunk.num_computed, trunk.num_tokens - again)
    is_inside = context.ledger.window.num_skipped_blocks(trunk.num_computed) >= trunk.blocks.num_skipped
    # The state stands after the last token, or blocks inside the next token's window were skipped: start from the
    # cache.
    if is_past or not is_inside:
        num_missing = context.ledger.window.max_blocks(context.layout.num_blocks(trunk.num_tokens))
        group.num_owned = 0
        trunk.give_back(context.ledger)
    elif is_named:
        num_missing += cache.blocks_per_unit
        group.num_owned -= cache.blocks_per_unit
        context.ledger.release(trunk.blocks.cut(group.num_owned), group.holder)
        trunk.num_sealed -= 1
    promised = trunk.recurrent.promise(context.ledger.states, num_states - trunk.recurrent.num_own)
    if not (promised and context.ledger.reserve(num_missing)):
        raise Refusal(KV_FULL)
    trunk.blocks.reserve += num_missing


def _lower_promise(context: GroupContext, group: SequenceGroup, most: int) -> None:
    """Return promised blocks beyond `most` to the ledger: fetching, or computing with windows, may have needed
    more."""
    num_left = min(group.trunk.blocks.reserve, most)
    context.ledger.unreserve(group.trunk.blocks.reserve - num_left)
    group.trunk.blocks.reserve = num_left


def _give_back_fetching(context: GroupContext, group: SequenceGroup) -> None:
    """Release the blocks of a fetch, or quarantine them while the fetch may still write into them."""
    trunk = group.trunk
    fetching = trunk.blocks.cut(group.num_owned)
    if group.fetch_settled:
        context.ledger.release(fetching, Holder.FETCHING)
    elif fetching:
        context.ledger.move(fetching, Holder.FETCHING, Holder.QUARANTINED)
        context.quarantined.setdefault(group.key, []).extend(fetching)
    if (states := context.ledger.states) is not None and (left := trunk.recurrent.pop_fetching()):
        if group.fetch_settled:
            states.release(left, Holder.FETCHING)
        else:
            states.move(left, Holder.FETCHING, Holder.QUARANTINED)
            context.quarantined_states.setdefault(group.key, []).extend(left)
