"""Every cell of the table: reach the state, let the event happen, see the next state and exactly one end."""

import ast
import asyncio
from pathlib import Path
from unittest.mock import ANY

import pytest

from baton.engine.core.request import (
    Acceptance,
    DecodeReport,
    FinishReason,
    FirstToken,
    Key,
    PrefillDone,
    Progress,
    Refusal,
    RequestEnded,
    TokenRun,
)
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.states import OPENING, KeyEvent, KeyState
from baton.worker.session.endings import ignore, refuse_in_use
from baton.worker.session.lifecycle import KeyTransition
from baton.worker.session.table import join_tables, table_markdown
from baton.worker.wire.end_status import Status
from decode_worker.parking import attach as attach_action
from kvtransfer.transfer.fetcher import FetchReport
from tests.support.worker.doubles import LEASE_ID, TABLE, Bench, OutboxDouble, make_spec

ROOT = Path(__file__).resolve().parents[3]
KEY, OTHER = Key("one", 1), Key("one", 2)  # of two attempts at the same request
REPORT = FetchReport(3, 12, 8, "shm", "exact", 0.1, 0.01, "because")
DONE = PrefillDone(KEY, (FirstToken(0, 7),), 0.1, 0.2, 0, 1)
FAILED = Status(14, "KV_TRANSFER_FAILED", "line broke")

# How a gateway and the world bring a key into each state.
PATHS = {
    KeyState.ABSENT: (),
    KeyState.ADMITTED: (KeyEvent.ADMIT,),
    KeyState.FETCHING: (KeyEvent.ADMIT, KeyEvent.FETCH),
    KeyState.STARTING: (KeyEvent.ADMIT, KeyEvent.FETCH, KeyEvent.START),
    KeyState.FETCHED: (KeyEvent.ADMIT, KeyEvent.FETCH, KeyEvent.FETCHED),
    KeyState.RUNNING: (KeyEvent.ADMIT, KeyEvent.FETCH, KeyEvent.FETCHED, KeyEvent.START),
    KeyState.PARKED: (KeyEvent.ADMIT, KeyEvent.FETCH, KeyEvent.FETCHED, KeyEvent.START, KeyEvent.UNREAD),
    KeyState.ORPHANED: (KeyEvent.ADMIT, KeyEvent.FETCH, KeyEvent.FETCHED, KeyEvent.START, KeyEvent.STREAM_LOST),
    KeyState.PREFILLING: (KeyEvent.PREFILL,),
    KeyState.HELD: (KeyEvent.PREFILL, KeyEvent.PREFILL_DONE),
    KeyState.ENDING: (KeyEvent.ADMIT, KeyEvent.FETCH, KeyEvent.CANCEL),
}
OPENED_BY = {
    KeyState.ADMITTED: KeyEvent.ADMIT,
    KeyState.PREFILLING: KeyEvent.PREFILL,
    KeyState.RUNNING: KeyEvent.PREFILL_HERE,
    KeyState.HELD: KeyEvent.OFFER,
}
STATUS = {  # of a live key that this ends
    KeyEvent.CANCEL: (1, "CANCELLED"),
    KeyEvent.DEADLINE: (4, "DEADLINE_EXCEEDED"),
    KeyEvent.GRACE_OVER: (14, "DRAINING"),
    KeyEvent.FETCH_FAILED: (14, "KV_TRANSFER_FAILED"),
    KeyEvent.STOP: (14, "KV_TRANSFER_FAILED"),
    KeyEvent.ENGINE_ENDED: (0, ""),
    KeyEvent.FETCH: (9, "BAD_COMMAND"),
    KeyEvent.START: (9, "BAD_COMMAND"),
}


def attach(key: Key = OTHER, **fields) -> pb.Attach:
    named = pb.Key(request_id=key.request_id, attempt=key.attempt)
    return pb.Attach(key=named, **{"next_index": [0], "budget_ms": 60_000, **fields})


def let(bench: Bench, event: KeyEvent) -> None:
    """Makes the event happen the way it does."""
    key, commands = pb.Key(request_id=KEY.request_id, attempt=KEY.attempt), bench.commands
    taker = pb.Prefill(key=key, spec=make_spec())
    taker.taker.instance = b"taker"
    offer = pb.Offer(key=key, budget_ms=60_000)
    offer.spans.hashes.append(b"h" * 32)
    by_command = {
        KeyEvent.ADMIT: {"admit": pb.Admit(key=key, spec=make_spec())},
        KeyEvent.PREFILL: {"prefill": taker},
        KeyEvent.PREFILL_HERE: {"prefill": pb.Prefill(key=key, spec=make_spec())},
        KeyEvent.FETCH: {"fetch": pb.Fetch(key=key, handle=b"handle", ticket=b"ticket")},
        KeyEvent.START: {"start": pb.Start(key=key, first_tokens=[pb.FirstToken(choice=0, token_id=7)])},
        KeyEvent.OFFER: {"offer": offer},
        KeyEvent.ATTACH: {"attach": attach()},
        KeyEvent.RENEW: {"renew_lease": pb.RenewLease(key=key, lease_id=LEASE_ID)},
        KeyEvent.CANCEL: {"cancel": pb.Cancel(key=key)},
    }
    leg = bench.leg(KEY)
    if event is KeyEvent.ATTACH:
        bench.obey(bench.other, **by_command[event])
    elif event in by_command:
        bench.obey(**by_command[event])
    elif event is KeyEvent.PROGRESS:
        commands.on_outputs([Progress(KEY, 64, 2)])
    elif event is KeyEvent.PREFILL_DONE:
        commands.on_outputs([DONE])
    elif event is KeyEvent.ENGINE_ENDED:
        bench.engine_ends(KEY)
    elif event is KeyEvent.STREAM_LOST:
        commands.on_stream_lost(bench.outbox)
    elif event is KeyEvent.GRACE_OVER:
        commands.on_grace_over()
    elif event is KeyEvent.UNREAD:
        bench.outbox.has_room = False
        commands.on_outputs([TokenRun(KEY, 0, 1, (5,))])
        bench.outbox.has_room = True
    elif event is KeyEvent.TOKENS:
        commands.on_outputs([TokenRun(KEY, 0, 1, (5,))])
    elif event is KeyEvent.STOP and leg is not None:
        bench.keys.stop(leg, FAILED)
    elif event is KeyEvent.READ:
        commands.on_read(KEY)
    elif event is KeyEvent.FETCHED and KEY in bench.intake.running:
        bench.intake.end(KEY, REPORT)
    elif event is KeyEvent.FETCH_FAILED and KEY in bench.intake.running:
        bench.intake.end(KEY, FAILED)
    elif event is KeyEvent.LEASE_OVER and KEY in bench.handoff.leased:
        bench.handoff.end(KEY)
    elif leg is not None:  # cannot happen by itself in this state; the table still says what would follow
        bench.keys.happen(leg, event, None)


@pytest.mark.parametrize("event", KeyEvent, ids=lambda event: event.value)
@pytest.mark.parametrize("state", KeyState, ids=lambda state: state.value)
def test_cell(state, event):
    asyncio.run(_check_cell(state, event))


async def _check_cell(state: KeyState, event: KeyEvent) -> None:
    bench, cell = Bench(), TABLE[state, event]
    if event is KeyEvent.REFUSED and state in OPENED_BY:
        _check_refused(bench, OPENED_BY[state])
        return
    for step in PATHS[state]:
        let(bench, step)
    leg = bench.leg(KEY)
    assert (leg.state if leg else KeyState.ABSENT) is state
    num_events = len(bench.outbox.events)
    let(bench, event)

    leg = bench.leg(KEY)
    if leg is not None:
        assert leg.state in (cell.state, *cell.others)
    else:  # nothing of it was out any more
        assert {KeyState.ENDING, KeyState.ABSENT} & {cell.state, *cell.others}
    if cell.action is ignore:
        assert len(bench.outbox.events) == num_events, "an ignored event was answered"
    if cell.action is refuse_in_use:
        assert bench.outbox.events[-1].refused.reason == "in_use"

    was_heard = leg is None or not leg.is_stream_lost
    if leg is not None and leg.state is not KeyState.ENDING:
        bench.keys.happen(leg, KeyEvent.CANCEL, None)
    bench.come_home(KEY)
    assert not bench.commands.legs, "something of it is still out"
    assert not bench.handoff.leased and not bench.intake.running
    opened = state is not KeyState.ABSENT or event in OPENING
    assert len(bench.ended) == opened
    if cell.action is attach_action:
        _check_attached(bench, state)
    elif event is KeyEvent.ATTACH and state is not KeyState.ENDING:
        assert bench.other.kinds() == ["not_here"]
    if state is KeyState.ORPHANED or (event is KeyEvent.STREAM_LOST and state is not KeyState.ENDING) or not was_heard:
        assert "ended" not in bench.outbox.kinds()
    elif opened and event is not KeyEvent.STREAM_LOST and cell.action is not attach_action:
        _check_ended(bench.outbox.only("ended"), state, event, cell)


def _check_refused(bench: Bench, opening: KeyEvent) -> None:
    """The answer is all that is left of it: it was in this state only while its command was obeyed."""
    for call in ("admit", "accept", "submit", "offer"):
        bench.engine.answer[call] = Refusal("kv_full", 0.25)
    let(bench, opening)
    refused = bench.outbox.only("refused")
    assert (refused.reason, refused.retry_after_ms) == ("kv_full", 250)
    assert bench.outbox.kinds() == ["refused"] and not bench.commands.legs and not bench.ended


def _check_attached(bench: Bench, state: KeyState) -> None:
    """Its output so far moves to the new key; the old key, if it lives, is notified."""
    assert bench.other.kinds() == ["granted", "ended"]
    for event in bench.other.events:
        assert getattr(event, event.WhichOneof("kind")).key.attempt == OTHER.attempt
    known = (7, 5) if state is KeyState.PARKED else (7,)
    assert [(run.key, run.first_index, run.token_ids) for run in bench.other.runs] == [(OTHER, 0, known)]
    assert bench.engine.calls[-2:] == [("resume", KEY, ANY), ("cancel", KEY)]
    if state is not KeyState.ORPHANED:
        assert bench.outbox.only("ended").reason == "ATTACHED" and bench.outbox.forgotten == [KEY]


def _check_ended(ended: pb.Ended, state: KeyState, event: KeyEvent, cell) -> None:
    assert (ended.key.request_id, ended.key.attempt) == KEY
    if cell.state is KeyState.ENDING and state is not KeyState.ENDING and event in STATUS:
        assert (ended.code, ended.reason) == STATUS[event]
    elif (state, event) == (KeyState.PREFILLING, KeyEvent.LEASE_OVER):
        assert ended.reason == "LEASE_EXPIRED"
    elif (state, event) == (KeyState.HELD, KeyEvent.LEASE_OVER):
        assert ended.code == 0
    else:
        assert ended.reason == "CANCELLED"


def test_the_table_has_every_cell():
    assert TABLE.keys() == {(state, event) for state in KeyState for event in KeyEvent}


async def test_an_action_leaves_its_key_in_a_state_that_its_cell_lists():
    """Each event, after each path, over an engine that answers and over one that has ended the key meanwhile; and each
    state that a cell lists is reached."""
    reached: set[tuple[KeyState, KeyEvent, KeyState]] = set()
    for path in (*PATHS.values(), (KeyEvent.PREFILL_HERE,), (*PATHS[KeyState.ORPHANED], KeyEvent.ENGINE_ENDED)):
        for event in set(KeyEvent) - {KeyEvent.REFUSED, KeyEvent.ALL_BACK}:  # which are part of another event
            for is_gone in (False, True):
                bench = Bench(table={place: _watched(place, cell, reached) for place, cell in TABLE.items()})
                for step in path:
                    let(bench, step)
                _let_with(bench, event, is_gone)
    listed = {(*place, state) for place, cell in TABLE.items() for state in (cell.state, *cell.others)}
    assert reached <= listed, reached - listed
    others = {(*place, state) for place, cell in TABLE.items() for state in cell.others}
    assert others <= reached, others - reached


def _let_with(bench: Bench, event: KeyEvent, is_gone: bool) -> None:
    if is_gone:
        bench.engine.answer |= dict.fromkeys(("start", "resume", "compute_rest"), LookupError("it has ended"))
        bench.engine.answer["offer"] = Acceptance((), 0)
    if is_gone and event is KeyEvent.ENGINE_ENDED:
        bench.engine_ends(KEY, "failed")
    elif is_gone and event is KeyEvent.TOKENS:
        let(bench, KeyEvent.UNREAD)
    elif is_gone and event is KeyEvent.PREFILL:
        bench.intake.begin_prefix = lambda *args: False
        message = pb.Prefill(key=pb.Key(request_id=KEY.request_id, attempt=KEY.attempt), spec=make_spec())
        message.taker.instance = b"taker"
        message.sources.add(handle=b"handle", ticket=b"ticket")
        bench.obey(prefill=message)
    else:
        let(bench, event)


def _watched(place, cell: KeyTransition, reached: set) -> KeyTransition:
    """The same, but it notes where the key is when its action returns."""

    def action(keys, leg, subject):
        cell.action(keys, leg, subject)
        is_gone = leg.state is KeyState.ABSENT and cell.state is not KeyState.ABSENT
        reached.add((*place, KeyState.ENDING if is_gone else leg.state))

    return cell._replace(action=action)


def test_a_state_is_set_in_one_place():
    found = []
    for folder in ("baton/worker", "prefill_worker", "decode_worker"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                targets = node.targets if isinstance(node, ast.Assign) else []
                found += [path.name for target in targets for each in ast.walk(target) if _is_state(each)]
    assert found == ["leg.py", "lifecycle.py"], "a leg is made absent; all else is the table's"


def _is_state(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store)


def test_two_roles_do_not_say_what_follows_in_one_cell():
    rows = {(KeyState.ABSENT, KeyEvent.ADMIT): KeyTransition(ignore, KeyState.ABSENT)}
    with pytest.raises(ValueError, match="admit in absent"):
        join_tables(rows, rows)


def test_the_table_for_people_has_every_cell():
    lines = table_markdown(TABLE).splitlines()
    assert len(lines) == 2 + len(KeyEvent)
    assert all(line.count(" | ") == len(KeyState) for line in lines)


# ---- what a table cannot say ----


def run(check) -> None:
    bench = Bench()

    async def main():
        check(bench)

    asyncio.run(main())


def test_a_draining_worker_refuses_what_is_new_and_ends_what_runs():
    def check(bench):
        let(bench, KeyEvent.ADMIT)
        bench.commands.start_draining()
        other = pb.Key(request_id="other")
        bench.obey(admit=pb.Admit(key=other, spec=make_spec()))
        assert bench.outbox.events[-1].refused.reason == "draining"
        let(bench, KeyEvent.PREFILL_HERE)
        assert bench.commands.legs[KEY].state is KeyState.RUNNING

    run(check)


@pytest.mark.parametrize("spec, names", [
    (make_spec(0), "num_prompt_tokens"),
    (make_spec(64, traceparent="x"), ""),
    (pb.RequestSpec(token_ids=[5000], num_prompt_tokens=1, max_tokens=1, budget_ms=9), "token_ids"),
    (make_spec(max_tokens=0), "max_tokens"),
])  # fmt: skip
def test_a_bad_command_ends_its_key_only(spec, names):
    def check(bench):
        if not names:
            del spec.span_hashes[:]
        bench.obey(admit=pb.Admit(key=pb.Key(request_id="bad"), spec=spec))
        ended = bench.outbox.only("ended")
        assert (ended.code, ended.reason) == (3, "BAD_COMMAND") and names in ended.message
        assert not bench.engine.calls and not bench.commands.legs

    run(check)


def test_a_budget_that_is_used_up_costs_nothing():
    def check(bench):
        bench.obey(admit=pb.Admit(key=pb.Key(request_id="late"), spec=make_spec(budget_ms=0)))
        assert bench.outbox.only("ended").code == 4
        assert not bench.engine.calls

    run(check)


def test_a_grant_that_is_not_used_lapses():
    async def main():
        bench = Bench()
        bench.obey(admit=pb.Admit(key=pb.Key(request_id=KEY[0], attempt=KEY[1]), spec=make_spec(budget_ms=200)))
        while not bench.engine.count("cancel"):
            await asyncio.sleep(0.005)
        bench.come_home(KEY)
        assert bench.outbox.only("ended").code == 4

    asyncio.run(main())


def test_another_gateways_key_is_not_touched():
    def check(bench):
        let(bench, KeyEvent.ADMIT)
        stranger, key = OutboxDouble(), pb.Key(request_id=KEY[0], attempt=KEY[1])
        bench.obey(stranger, admit=pb.Admit(key=key, spec=make_spec()))
        bench.obey(stranger, cancel=pb.Cancel(key=key))
        bench.obey(stranger, start=pb.Start(key=key))
        assert stranger.kinds() == ["refused"] and stranger.only("refused").reason == "in_use"
        assert bench.commands.legs[KEY].state is KeyState.ADMITTED
        bench.commands.on_stream_lost(stranger)
        assert bench.commands.legs[KEY].state is KeyState.ADMITTED

    run(check)


def test_a_cancelled_fetch_gives_its_blocks_up_before_it_is_stopped():
    def check(bench):
        let(bench, KeyEvent.ADMIT)
        let(bench, KeyEvent.FETCH)
        bench.engine.calls.clear()
        let(bench, KeyEvent.CANCEL)
        assert bench.engine.calls == [("cancel", KEY)] and bench.intake.stopped == [KEY]
        bench.engine_ends(KEY, "cancelled")
        assert "ended" not in bench.outbox.kinds(), "bytes may still land"
        bench.intake.end(KEY, Status(1, "CANCELLED"))
        assert bench.outbox.only("ended").code == 1

    run(check)


def test_the_engine_says_why_a_fetch_had_no_place():
    """The loop ended the key (its deadline) while bytes were on their way."""

    def check(bench):
        let(bench, KeyEvent.ADMIT)
        let(bench, KeyEvent.FETCH)
        bench.intake.end(KEY, None)
        bench.engine_ends(KEY, "deadline")
        assert bench.outbox.only("ended").code == 4

    run(check)


def test_start_after_the_engine_ended_it():
    def check(bench):
        for step in PATHS[KeyState.FETCHED]:
            let(bench, step)
        bench.engine.answer["start"] = LookupError("gone")
        let(bench, KeyEvent.START)
        bench.engine_ends(KEY, "deadline")
        assert bench.outbox.only("ended").code == 4

    run(check)


def test_a_failed_offer_gives_the_blocks_back():
    def check(bench):
        def refuse(*args):
            raise ValueError("a taker of another shape")

        bench.handoff.lease_prompt = refuse
        let(bench, KeyEvent.PREFILL)
        assert ("cancel", KEY) in bench.engine.calls
        bench.engine_ends(KEY, "cancelled")
        assert bench.outbox.only("ended").code == 3

    run(check)


def test_not_here_is_the_whole_answer():
    def check(bench):
        offer = pb.Offer(key=pb.Key(request_id="chain"), budget_ms=1000)
        offer.spans.hashes.extend([b"h" * 32, b"i" * 32])
        bench.obey(offer=offer)
        assert not bench.outbox.events, "its blocks are still leased"
        bench.engine_ends(Key("chain"), "cancelled")
        assert bench.outbox.only("not_here").num_matched_tokens == 64 and bench.outbox.kinds() == ["not_here"]

    run(check)


def test_done_goes_out_before_the_tokens_and_ended_after_them():
    def check(bench):
        let(bench, KeyEvent.PREFILL_HERE)
        run_ = TokenRun(KEY, 0, 1, (4, 5))
        report = DecodeReport(0.1, 0.2, 0.3, 4, 5)
        bench.commands.on_outputs([DONE, run_, RequestEnded(KEY, report=report)])
        assert bench.outbox.kinds() == ["done", "ended"] and bench.outbox.runs == [run_]
        decode = bench.outbox.only("ended").decode
        assert (decode.num_steps, decode.num_preemptions) == (4, 5)
        assert bench.ended[0].num_output_tokens == 3

    run(check)


def bring_to(bench: Bench, state: KeyState) -> None:
    for step in PATHS[state]:
        let(bench, step)


def test_tokens_of_a_step_that_was_under_way_are_not_lost():
    def check(bench):
        bring_to(bench, KeyState.ORPHANED)
        bench.commands.on_outputs([TokenRun(KEY, 0, 1, (5, 6))])
        assert not bench.outbox.runs
        bench.obey(bench.other, attach=attach(next_index=[1]))
        bench.commands.on_outputs([TokenRun(KEY, 0, 3, (8,)), RequestEnded(KEY)])
        runs = [(run.key, run.first_index, run.token_ids) for run in bench.other.runs]
        assert runs == [(OTHER, 1, (5, 6)), (OTHER, 3, (8,))]
        assert bench.other.only("ended").code == 0 and not bench.commands.legs

    run(check)


def test_a_sequence_that_had_ended_is_read_to_its_end():
    def check(bench):
        bring_to(bench, KeyState.ORPHANED)
        last = TokenRun(KEY, 0, 1, (5,), finish_reason=FinishReason.LENGTH)
        bench.commands.on_outputs([last, RequestEnded(KEY)])
        assert bench.leg(KEY).state is KeyState.ORPHANED
        bench.obey(bench.other, attach=attach())
        (told,) = bench.other.runs
        assert (told.token_ids, told.finish_reason) == ((7, 5), FinishReason.LENGTH)
        assert bench.other.only("ended").code == 0
        assert not bench.engine.count("resume") and not bench.commands.legs

    run(check)


@pytest.mark.parametrize("fields", [
    {"fingerprint": b"another request"},
    {"previous_attempt": 7},
    {"next_index": [2]},  # more than it has
    {"next_index": [0, 0]},
    {"key": Key("two", 2)},
], ids=str)  # fmt: skip
def test_only_the_same_request_is_gone_on_with(fields):
    def check(bench):
        bring_to(bench, KeyState.ORPHANED)
        bench.obey(bench.other, attach=attach(**fields))
        assert bench.other.kinds() == ["not_here"]
        assert bench.leg(KEY).state is KeyState.ORPHANED

    run(check)


def test_nobody_comes():
    async def main():
        bench = Bench(resume_window_s=0.05)
        bring_to(bench, KeyState.ORPHANED)
        while not bench.engine.count("cancel"):
            await asyncio.sleep(0.005)
        bench.engine_ends(KEY, "cancelled")
        assert not bench.commands.legs and bench.ended[0].status.reason == "STREAM_LOST"

    asyncio.run(main())


def test_a_prompt_that_is_still_read_here_is_not_parked():
    def check(bench):
        let(bench, KeyEvent.PREFILL_HERE)
        let(bench, KeyEvent.STREAM_LOST)
        assert bench.leg(KEY).state is KeyState.ENDING and not bench.engine.count("park")

    run(check)


def test_a_parked_sequence_meets_the_deadline_of_who_attached():
    async def main():
        bench = Bench()
        bring_to(bench, KeyState.ORPHANED)
        bench.obey(bench.other, attach=attach(budget_ms=30))
        while not bench.engine.count("cancel"):
            await asyncio.sleep(0.005)
        bench.engine_ends(KEY, "cancelled")
        assert bench.other.only("ended").code == 4

    asyncio.run(main())
