"""Move groups through their states: `happen` looks an event up in TABLE, runs its action and sets the state.

The loop alone ends a group that it has (waiting or running), between steps: other threads post a command. Any thread
may end any other group at any time, so a caller looks it up and acts on it under one lock.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from baton.engine.core.request import Key, RequestEnded
from baton.engine.kv.ledger import Holder
from baton.engine.schedule import group_actions
from baton.engine.schedule.groups import GroupContext
from baton.engine.schedule.sequence import SequenceGroup
from baton.engine.schedule.states import GroupEvent, GroupState


class GroupTransition(NamedTuple):
    """What an event does in a state: run `action`, then enter `state`."""

    action: Callable[[GroupContext, SequenceGroup, Any], RequestEnded | None]
    state: GroupState


class GroupLifecycle(GroupContext):
    """Keeps every live group of one engine and applies its events. Thread-safe: methods take the ledger's lock."""

    def happen(self, group: SequenceGroup, event: GroupEvent, payload: Any = None) -> RequestEnded | None:
        """Apply an event to a group. Returns the group's end if the event ended it; the caller passes that on.

        `payload` is the event's payload, see the actions. If the action raises (LookupError for an event that comes too
        late, Refusal, ValueError), the state stays as it was.
        """
        with self.ledger.lock:
            action, state = TABLE[group.state, event]
            ended = action(self, group, payload)
            group.state = state
            return ended

    def fetch_settled(self, key: Key) -> None:
        """Release the quarantined blocks of a key, live or ended: no byte of its fetch can land any more."""
        with self.ledger.lock:
            self.ledger.release(self.quarantined.pop(key, []), Holder.QUARANTINED)
            if self.ledger.states is not None:
                self.ledger.states.release(self.quarantined_states.pop(key, []), Holder.QUARANTINED)
            if (group := self.groups.get(key)) is not None:
                group.fetch_settled = True


def _table() -> dict[tuple[GroupState, GroupEvent], GroupTransition]:
    s, e, act, to = GroupState, GroupEvent, group_actions, GroupTransition
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
