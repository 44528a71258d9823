"""Every cell of the table of a group's states: bring a group there, let the event happen, and see the state, the blocks
and exactly one end. No model computes; what the loop would do is done by hand."""

import pytest

from baton.engine.adapters.adapters import Adapters
from baton.engine.core.config import EngineConfig
from baton.engine.core.request import FirstToken, Key, RequestEnded
from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.schedule import group_actions
from baton.engine.schedule.admission import Admission
from baton.engine.schedule.counters import OutputLengths
from baton.engine.schedule.group_actions import Ending
from baton.engine.schedule.groups import Groups
from baton.engine.schedule.inbox import Enter, Inbox, Start
from baton.engine.schedule.lifecycle import TABLE, GroupLifecycle
from baton.engine.schedule.scheduler import Scheduler
from baton.engine.schedule.sequence import Copies, SequenceGroup
from baton.engine.schedule.states import GroupEvent, GroupState
from baton.engine.schedule.tenant_shares import Shares
from kvtransfer.layout import KVGroup, KVLayout
from tests.support.engine.toy_engine import engine_request

E, S = GroupEvent, GroupState
NUM_BLOCKS, NUM_TOKENS, BLOCK_SIZE = 64, 150, 16
KEY, OTHER = Key("one"), Key("other")
FIRST = (FirstToken(0, 7),)


OPENING = (E.ADMIT, E.ACCEPT, E.ACCEPT_PREFIX, E.OFFER)
WAIT_HERE = (E.ADMIT, E.COMPUTE_REST, E.ENTER)
PATHS = {  # as an admitted or offered key, and where there is one as a prefill for a taker
    S.NEW: [()],
    S.FETCHING: [(E.ADMIT,), (E.ADMIT, E.SET_ASIDE, E.VERIFY), (E.ACCEPT_PREFIX, E.FETCH, E.VERIFY)],
    S.WAITING: [(E.ADMIT, E.COMPUTE_REST), (E.ACCEPT,), (E.ADMIT, E.SET_ASIDE, E.VERIFY, E.START)],
    S.RUNNING: [(*WAIT_HERE, E.LAUNCH), (E.ACCEPT, E.ENTER, E.LAUNCH), (E.ADMIT, E.SET_ASIDE, E.VERIFY, E.START, E.JOIN)],
    S.HELD: [(E.ACCEPT, E.ENTER, E.LAUNCH, E.HOLD), (E.OFFER,)],
    S.PARKED: [(E.ADMIT, E.SET_ASIDE, E.VERIFY, E.START, E.JOIN, E.PARK)],
    S.FINISHED: [(*WAIT_HERE, E.LAUNCH, E.END)],
}  # fmt: skip


def no_copy(source: int, target: int) -> None:
    """There is nothing in these blocks."""


class GroupHarness:
    """The lifecycle of groups without a model; `group` is the one that receives the events."""

    def __init__(self):
        config = EngineConfig(model="m", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_model_len=512)
        layout = KVLayout((KVGroup("paged", 1, 1, 8, "fp32", BLOCK_SIZE),))
        self.ledger, self.inbox, groups, lengths = Ledger(NUM_BLOCKS, BLOCK_SIZE), Inbox(), Groups(), OutputLengths()
        shares = Shares(config, layout, self.ledger, groups)
        self.scheduler = Scheduler(config, layout, self.ledger, shares, lengths, Copies(no_copy, no_copy))
        self.lifecycle = GroupLifecycle(layout, self.ledger, self.inbox, groups, self.scheduler, None)
        self.admission = Admission(config, layout, self.lifecycle, shares, Adapters(None))
        self.request = engine_request(KEY.request_id, list(range(1, NUM_TOKENS + 1)), 20)
        self.group: SequenceGroup | None = None
        self.ends: list[RequestEnded] = []

    def open(self, event: GroupEvent) -> None:
        if event is E.ADMIT:
            self.admission.admit(self.request)
        elif event is E.OFFER:
            spans = self.cache_spans()
            assert self.admission.offer(KEY, spans).num_cached_tokens == 128
        else:
            self.admission.accept(self.request, fetches=event is E.ACCEPT_PREFIX)
        self.group = self.lifecycle.groups[KEY]

    def cache_spans(self) -> tuple[bytes, ...]:
        """Another request leaves its spans in the cache."""
        request = engine_request(OTHER.request_id, list(range(1, NUM_TOKENS + 1)), 20)
        self.admission.admit(request)
        self.admission.set_aside(OTHER, NUM_TOKENS)
        self.admission.verify(OTHER, NUM_TOKENS)
        self.admission.fetch_settled(OTHER)
        self.admission.cancel(OTHER)
        assert [command.key for command in self.inbox.drain()] == [OTHER]
        return request.span_hashes

    def make_happen(self, event: GroupEvent) -> None:
        """Of an event, with what it brings."""
        if event in OPENING and self.group is None:
            return self.open(event)
        group = self.group or SequenceGroup(self.request, Holder.RUNNING)
        if event is E.JOIN and group.state is S.WAITING and group.prefilled:
            self.scheduler.fork(group.trunk, list(FIRST))
        if event is E.LAUNCH and group.state is S.WAITING and group.trunk in self.scheduler.waiting:
            self.scheduler.schedule()
        payload = {
            E.SKIP: NUM_TOKENS,
            E.SET_ASIDE: NUM_TOKENS,
            E.VERIFY: NUM_TOKENS if Holder.FETCHING in self.holders() else 0,
            E.START: FIRST,
            E.LAUNCH: 1.0,
            E.CANCEL: Ending("cancelled"),
            E.DEADLINE: Ending("deadline"),
        }.get(event, Ending())
        if (ended := self.lifecycle.happen(group, event, payload)) is not None:
            self.ends.append(ended)

    def holders(self) -> set[Holder]:
        return {holder for holder, block_ids in self.lifecycle.holdings() if block_ids}

    def check(self) -> None:
        self.ledger.check_integrity()
        self.ledger.check_holders(self.lifecycle.holdings())
        assert self.ledger.num_reserved == self.lifecycle.num_promised()


def can_be(state: GroupState, path: tuple[GroupEvent, ...], event: GroupEvent) -> bool:
    """A prefill for a taker is held and never parked, any other parks and is never held."""
    return state is not S.RUNNING or event is not (E.HOLD if E.ADMIT in path else E.PARK)


@pytest.mark.parametrize(
    ("state", "path", "event"),
    [(state, path, event) for state in PATHS for path in PATHS[state] for event in E if can_be(state, path, event)],
    ids=lambda value: "-".join(event.value for event in value) if isinstance(value, tuple) else value.value,
)
def test_every_event_in_every_state(state, path, event):
    harness, cell = GroupHarness(), TABLE[state, event]
    for step in path:
        harness.make_happen(step)
        harness.check()
    if harness.group is not None:
        assert harness.group.state is state
    error = {group_actions.refuse_late: LookupError, group_actions.refuse_in_use: ValueError}.get(cell.action)
    if event is E.START and state is S.FETCHING and harness.group.trunk.remaining:
        error = ValueError  # its last block is not verified
    held, num_ends, num_commands = harness.ledger.counts(), len(harness.ends), len(harness.inbox)
    if error is not None:
        with pytest.raises(error):
            harness.make_happen(event)
    else:
        harness.make_happen(event)
    harness.check()
    if harness.group is not None:
        assert harness.group.state is (state if error is not None else cell.state)
    if error is not None or cell.action is group_actions.ignore:
        assert (harness.ledger.counts(), len(harness.ends), len(harness.inbox)) == (held, num_ends, num_commands)
    assert len(harness.ends) - num_ends == (cell.state is S.FINISHED and state is not S.FINISHED)

    # In every case it ends once, and everything is back.
    if harness.group is not None:
        harness.make_happen(E.END)
        harness.admission.fetch_settled(KEY)
        harness.check()
        assert [ended.key for ended in harness.ends] == [KEY] and not harness.lifecycle.groups
        assert harness.ledger.num_available == NUM_BLOCKS and not harness.ledger.num_reserved
        assert not harness.scheduler.has_work()
        assert harness.lifecycle.num_choices == 0 and harness.lifecycle.num_waiting_tokens == 0


def test_every_state_is_walked_to():
    assert set(PATHS) == set(GroupState) and set(TABLE) == {(state, event) for state in S for event in E}


def test_state_is_set_in_one_place():
    """By GroupLifecycle.happen, and once when a group is made."""
    from baton.engine import schedule
    from tests.support.state_table import assignments_of

    assert assignments_of("state", schedule) == ["lifecycle.py", "sequence.py"]


def test_commands_of_a_new_key():
    """The loop receives Enter for a prompt to be read, Start for one that was fetched."""
    for path, kind in ((WAIT_HERE[:2], Enter), ((E.ADMIT, E.SET_ASIDE, E.VERIFY, E.START), Start)):
        harness = GroupHarness()
        for event in path:
            harness.make_happen(event)
        assert [type(command) for command in harness.inbox.drain()] == [kind]
