"""Every cell of the table: reach the state, let the event happen, see the next state and exactly one end."""

import ast
import asyncio
from unittest.mock import ANY

import pytest

from baton.engine.core.request import (
    Acceptance,
    Refusal,
)
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.states import OPENING, LegEvent, LegState
from baton.worker.session.endings import ignore, refuse_in_use
from baton.worker.session.leg_machine import LegTransition
from baton.worker.session.table import join_tables
from decode_worker.parking import attach as attach_action
from tests.support.process import ROOT
from tests.support.worker.fakes import TABLE, LegMachineHarness, numbered_spec
from tests.support.worker.key_paths import KEY, OTHER, PATHS, make_happen

OPENED_BY = {
    LegState.ADMITTED: LegEvent.ADMIT,
    LegState.PREFILLING: LegEvent.PREFILL,
    LegState.RUNNING: LegEvent.PREFILL_HERE,
    LegState.HELD: LegEvent.OFFER,
}


STATUS = {  # of a live key that this ends
    LegEvent.CANCEL: (1, "CANCELLED"),
    LegEvent.DEADLINE: (4, "DEADLINE_EXCEEDED"),
    LegEvent.GRACE_OVER: (14, "DRAINING"),
    LegEvent.FETCH_FAILED: (14, "KV_TRANSFER_FAILED"),
    LegEvent.STOP: (14, "KV_TRANSFER_FAILED"),
    LegEvent.ENGINE_ENDED: (0, ""),
    LegEvent.FETCH: (9, "BAD_COMMAND"),
    LegEvent.START: (9, "BAD_COMMAND"),
}


@pytest.mark.parametrize("event", LegEvent, ids=lambda event: event.value)
@pytest.mark.parametrize("state", LegState, ids=lambda state: state.value)
def test_every_event_in_every_state(state, event):
    asyncio.run(_check_cell(state, event))


async def _check_cell(state: LegState, event: LegEvent) -> None:
    harness, cell = LegMachineHarness(), TABLE[state, event]
    if event is LegEvent.REFUSED and state in OPENED_BY:
        _check_refused(harness, OPENED_BY[state])
        return
    for step in PATHS[state]:
        make_happen(harness, step)
    leg = harness.leg(KEY)
    assert (leg.state if leg else LegState.ABSENT) is state
    num_events = len(harness.outbox.events)
    make_happen(harness, event)

    leg = harness.leg(KEY)
    if leg is not None:
        assert leg.state in (cell.state, *cell.others)
    else:  # nothing of it was out any more
        assert {LegState.ENDING, LegState.ABSENT} & {cell.state, *cell.others}
    if cell.action is ignore:
        assert len(harness.outbox.events) == num_events, "an ignored event was answered"
    if cell.action is refuse_in_use:
        assert harness.outbox.events[-1].refused.reason == "in_use"

    was_heard = leg is None or not leg.is_stream_lost
    if leg is not None and leg.state is not LegState.ENDING:
        harness.machine.happen(leg, LegEvent.CANCEL, pb.Cancel())
    harness.come_home(KEY)
    assert not harness.dispatcher.legs, "something of it is still out"
    assert not harness.handoff.leased and not harness.intake.running
    opened = state is not LegState.ABSENT or event in OPENING
    assert len(harness.ended) == opened
    if cell.action is attach_action:
        _check_attached(harness, state)
    elif event is LegEvent.ATTACH and state is not LegState.ENDING:
        assert harness.other.kinds() == ["not_here"]
    if state is LegState.ORPHANED or (event is LegEvent.STREAM_LOST and state is not LegState.ENDING) or not was_heard:
        assert "ended" not in harness.outbox.kinds()
    elif opened and event is not LegEvent.STREAM_LOST and cell.action is not attach_action:
        _check_ended(harness.outbox.only("ended"), state, event, cell)


def _check_refused(harness: LegMachineHarness, opening: LegEvent) -> None:
    """The answer is all that is left of it: it was in this state only while its command was obeyed."""
    for call in ("admit", "accept", "submit", "offer"):
        harness.engine.answer[call] = Refusal("kv_full", 0.25)
    make_happen(harness, opening)
    refused = harness.outbox.only("refused")
    assert (refused.reason, refused.retry_after_ms) == ("kv_full", 250)
    assert harness.outbox.kinds() == ["refused"] and not harness.dispatcher.legs and not harness.ended


def _check_attached(harness: LegMachineHarness, state: LegState) -> None:
    """Its output so far moves to the new key; the old key, if it lives, is notified."""
    assert harness.other.kinds() == ["granted", "ended"]
    for event in harness.other.events:
        assert getattr(event, event.WhichOneof("kind")).key.attempt == OTHER.attempt
    known = (7, 5) if state is LegState.PARKED else (7,)
    assert [(run.key, run.first_index, run.token_ids) for run in harness.other.runs] == [(OTHER, 0, known)]
    assert harness.engine.calls[-2:] == [("resume", KEY, ANY), ("cancel", KEY)]
    if state is not LegState.ORPHANED:
        assert harness.outbox.only("ended").reason == "ATTACHED" and harness.outbox.forgotten == [KEY]


def _check_ended(ended: pb.Ended, state: LegState, event: LegEvent, cell) -> None:
    assert (ended.key.request_id, ended.key.attempt) == KEY
    if cell.state is LegState.ENDING and state is not LegState.ENDING and event in STATUS:
        assert (ended.code, ended.reason) == STATUS[event]
    elif (state, event) == (LegState.PREFILLING, LegEvent.LEASE_OVER):
        assert ended.reason == "LEASE_EXPIRED"
    elif (state, event) == (LegState.HELD, LegEvent.LEASE_OVER):
        assert ended.code == 0
    else:
        assert ended.reason == "CANCELLED"


def test_the_table_has_every_cell():
    assert TABLE.keys() == {(state, event) for state in LegState for event in LegEvent}


async def test_an_action_leaves_its_key_in_a_state_that_its_cell_lists():
    """Each event, after each path, over an engine that answers and over one that has ended the key meanwhile; and each
    state that a cell lists is reached."""
    reached: set[tuple[LegState, LegEvent, LegState]] = set()
    for path in (*PATHS.values(), (LegEvent.PREFILL_HERE,), (*PATHS[LegState.ORPHANED], LegEvent.ENGINE_ENDED)):
        for event in set(LegEvent) - {LegEvent.REFUSED, LegEvent.ALL_BACK}:  # which are part of another event
            for is_gone in (False, True):
                harness = LegMachineHarness(
                    table={place: _watched(place, cell, reached) for place, cell in TABLE.items()}
                )
                for step in path:
                    make_happen(harness, step)
                _let_with(harness, event, is_gone)
    listed = {(*place, state) for place, cell in TABLE.items() for state in (cell.state, *cell.others)}
    assert reached <= listed, reached - listed
    others = {(*place, state) for place, cell in TABLE.items() for state in cell.others}
    assert others <= reached, others - reached


def _let_with(harness: LegMachineHarness, event: LegEvent, is_gone: bool) -> None:
    if is_gone:
        harness.engine.answer |= dict.fromkeys(("start", "resume", "compute_rest"), LookupError("it has ended"))
        harness.engine.answer["offer"] = Acceptance((), 0)
    key = pb.Key(request_id=KEY.request_id, attempt=KEY.attempt)
    if event is LegEvent.ADMIT:
        harness.dispatch(admit=pb.Admit(key=key, spec=numbered_spec(), prefill=True))
    elif is_gone and event is LegEvent.ENGINE_ENDED:
        harness.engine_ends(KEY, "failed")
    elif is_gone and event is LegEvent.TOKENS:
        make_happen(harness, LegEvent.UNREAD)
    elif is_gone and event is LegEvent.PREFILL:
        harness.intake.begin_prefix = lambda *args: False
        message = pb.Prefill(key=key, spec=numbered_spec())
        message.taker.instance = b"taker"
        message.sources.add(handle=b"handle", ticket=b"ticket")
        harness.dispatch(prefill=message)
    else:
        make_happen(harness, event)


def _watched(place, cell: LegTransition, reached: set) -> LegTransition:
    """The same, but it notes where the key is when its action returns."""

    def action(machine, leg, payload):
        cell.action(machine, leg, payload)
        is_gone = leg.state is LegState.ABSENT and cell.state is not LegState.ABSENT
        reached.add((*place, LegState.ENDING if is_gone else leg.state))

    return cell._replace(action=action)


def test_a_state_is_set_in_one_place():
    found = []
    for folder in ("baton/worker", "prefill_worker", "decode_worker"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                targets = node.targets if isinstance(node, ast.Assign) else []
                found += [path.name for target in targets for each in ast.walk(target) if _is_state(each)]
    assert found == ["leg.py", "leg_machine.py"], "a leg is made absent; all else is the table's"


def _is_state(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store)


def test_two_roles_do_not_say_what_follows_in_one_cell():
    rows = {(LegState.ABSENT, LegEvent.ADMIT): LegTransition(ignore, LegState.ABSENT)}
    with pytest.raises(ValueError, match="admit in absent"):
        join_tables(rows, rows)
