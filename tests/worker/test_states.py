"""Every cell of the table: reach the state let the event happen, see the next state and exactly one end."""

import asyncio
from unittest.mock import ANY

import pytest

from baton.engine.request import (
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
from baton.worker.commands import Commands
from baton.worker.endings import Status
from baton.worker.states import OPENING, TABLE, Event, State, state_table_markdown
from kvtransfer.fetcher import FetchReport
from tests.worker.doubles import LEASE_ID, Bench, OutboxDouble, make_spec

KEY, OTHER = Key("one", 1), Key("one", 2)  # of two attempts at the same request
REPORT = FetchReport(3, 12, 8, "shm", "exact", 0.1, 0.01, "because")
DONE = PrefillDone(KEY, (FirstToken(0, 7),), 0.1, 0.2, 0, 1)
FAILED = Status(14, "KV_TRANSFER_FAILED", "line broke")

# How a gateway and the world bring a key into each state.
PATHS = {
    State.ABSENT: (),
    State.ADMITTED: (Event.ADMIT,),
    State.FETCHING: (Event.ADMIT, Event.FETCH),
    State.STARTING: (Event.ADMIT, Event.FETCH, Event.START),
    State.FETCHED: (Event.ADMIT, Event.FETCH, Event.FETCHED),
    State.RUNNING: (Event.ADMIT, Event.FETCH, Event.FETCHED, Event.START),
    State.PARKED: (Event.ADMIT, Event.FETCH, Event.FETCHED, Event.START, Event.UNREAD),
    State.ORPHANED: (Event.ADMIT, Event.FETCH, Event.FETCHED, Event.START, Event.STREAM_LOST),
    State.PREFILLING: (Event.PREFILL,),
    State.HELD: (Event.PREFILL, Event.PREFILL_DONE),
    State.ENDING: (Event.ADMIT, Event.FETCH, Event.CANCEL),
}
STATUS = {  # of a live key that this ends
    Event.CANCEL: (1, "CANCELLED"),
    Event.DEADLINE: (4, "DEADLINE_EXCEEDED"),
    Event.GRACE_OVER: (14, "DRAINING"),
    Event.FETCH_FAILED: (14, "KV_TRANSFER_FAILED"),
    Event.ENGINE_ENDED: (0, ""),
    Event.FETCH: (9, "BAD_COMMAND"),
    Event.START: (9, "BAD_COMMAND"),
}


def attach(key: Key = OTHER, **fields) -> pb.Attach:
    named = pb.Key(request_id=key.request_id, attempt=key.attempt)
    return pb.Attach(key=named, **{"next_index": [0], "budget_ms": 60_000, **fields})


def let(bench: Bench, event: Event) -> None:
    """Makes the event happen the way it does."""
    key, commands = pb.Key(request_id=KEY.request_id, attempt=KEY.attempt), bench.commands
    taker = pb.Prefill(key=key, spec=make_spec())
    taker.taker.instance = b"taker"
    offer = pb.Offer(key=key, budget_ms=60_000)
    offer.spans.hashes.append(b"h" * 32)
    by_command = {
        Event.ADMIT: {"admit": pb.Admit(key=key, spec=make_spec())},
        Event.PREFILL: {"prefill": taker},
        Event.PREFILL_HERE: {"prefill": pb.Prefill(key=key, spec=make_spec())},
        Event.FETCH: {"fetch": pb.Fetch(key=key, handle=b"handle", ticket=b"ticket")},
        Event.START: {"start": pb.Start(key=key, first_tokens=[pb.FirstToken(choice=0, token_id=7)])},
        Event.OFFER: {"offer": offer},
        Event.ATTACH: {"attach": attach()},
        Event.RENEW: {"renew_lease": pb.RenewLease(key=key, lease_id=LEASE_ID)},
        Event.CANCEL: {"cancel": pb.Cancel(key=key)},
    }
    leg = bench.leg(KEY)
    if event is Event.ATTACH:
        bench.obey(bench.other, **by_command[event])
    elif event in by_command:
        bench.obey(**by_command[event])
    elif event is Event.PROGRESS:
        commands.on_outputs([Progress(KEY, 64, 2)])
    elif event is Event.PREFILL_DONE:
        commands.on_outputs([DONE])
    elif event is Event.ENGINE_ENDED:
        bench.engine_ends(KEY)
    elif event is Event.STREAM_LOST:
        commands.on_stream_lost(bench.outbox)
    elif event is Event.GRACE_OVER:
        commands.on_grace_over()
    elif event is Event.UNREAD:
        bench.outbox.has_room = False
        commands.on_outputs([TokenRun(KEY, 0, 1, (5,))])
        bench.outbox.has_room = True
    elif event is Event.READ:
        commands.on_read(KEY)
    elif event is Event.FETCHED and KEY in bench.intake.running:
        bench.intake.end(KEY, REPORT)
    elif event is Event.FETCH_FAILED and KEY in bench.intake.running:
        bench.intake.end(KEY, FAILED)
    elif event is Event.LEASE_OVER and KEY in bench.handoff.leased:
        bench.handoff.end(KEY)
    elif leg is not None:  # cannot happen by itself in this state; the table still says what would follow
        commands.happen(leg, event, None)


@pytest.mark.parametrize("event", Event, ids=lambda event: event.value)
@pytest.mark.parametrize("state", State, ids=lambda state: state.value)
def test_cell(state, event):
    asyncio.run(_check_cell(state, event))


async def _check_cell(state: State, event: Event) -> None:
    bench, cell = Bench(), TABLE[state, event]
    for step in PATHS[state]:
        let(bench, step)
    leg = bench.leg(KEY)
    assert (leg.state if leg else State.ABSENT) is state
    num_events = len(bench.outbox.events)
    let(bench, event)

    leg = bench.leg(KEY)
    if leg is not None:
        assert leg.state is cell.state
    else:  # nothing of it was out any more
        assert cell.state in (State.ENDING, State.ABSENT)
    if cell.action == "ignore":
        assert len(bench.outbox.events) == num_events, "an ignored event was answered"
    if cell.action == "refuse_in_use":
        assert bench.outbox.events[-1].refused.reason == "in_use"

    was_heard = leg is None or not leg.is_stream_lost
    if leg is not None and leg.state is not State.ENDING:
        bench.commands.happen(leg, Event.CANCEL, None)
    bench.come_home(KEY)
    assert not bench.commands.legs, "something of it is still out"
    assert not bench.handoff.leased and not bench.intake.running
    opened = state is not State.ABSENT or event in OPENING
    assert len(bench.ended) == opened
    if cell.action == "attach":
        _check_attached(bench, state)
    elif event is Event.ATTACH and state is not State.ENDING:
        assert bench.other.kinds() == ["not_here"]
    if state is State.ORPHANED or (event is Event.STREAM_LOST and state is not State.ENDING) or not was_heard:
        assert "ended" not in bench.outbox.kinds()
    elif opened and event is not Event.STREAM_LOST and cell.action != "attach":
        _check_ended(bench.outbox.only("ended"), state, event, cell)


def _check_attached(bench: Bench, state: State) -> None:
    """What it has put out so far goes the new way, under the new key; the old one, if it lives, is told."""
    assert bench.other.kinds() == ["granted", "ended"]
    for event in bench.other.events:
        assert getattr(event, event.WhichOneof("kind")).key.attempt == OTHER.attempt
    known = (7, 5) if state is State.PARKED else (7,)
    assert [(run.key, run.first_index, run.token_ids) for run in bench.other.runs] == [(OTHER, 0, known)]
    assert bench.engine.calls[-2:] == [("resume", KEY, ANY), ("cancel", KEY)]
    if state is not State.ORPHANED:
        assert bench.outbox.only("ended").reason == "ATTACHED" and bench.outbox.forgotten == [KEY]


def _check_ended(ended: pb.Ended, state: State, event: Event, cell) -> None:
    assert (ended.key.request_id, ended.key.attempt) == KEY
    if cell.state is State.ENDING and state is not State.ENDING and event in STATUS:
        assert (ended.code, ended.reason) == STATUS[event]
    elif (state, event) == (State.PREFILLING, Event.LEASE_OVER):
        assert ended.reason == "LEASE_EXPIRED"
    elif (state, event) == (State.HELD, Event.LEASE_OVER):
        assert ended.code == 0
    else:
        assert ended.reason == "CANCELLED"


def test_the_table_names_real_actions():
    assert {state for state, _ in TABLE} == set(State) and {event for _, event in TABLE} == set(Event)
    for cell in TABLE.values():
        assert callable(getattr(Commands, f"_{cell.action}"))


def test_the_table_for_people_has_every_cell():
    lines = state_table_markdown().splitlines()
    assert len(lines) == 2 + len(Event)
    assert all(line.count(" | ") == len(State) for line in lines)


# ---- what a table cannot say ----


def run(check) -> None:
    bench = Bench()

    async def main():
        check(bench)

    asyncio.run(main())


def test_a_refusal_is_the_whole_answer():
    def check(bench):
        bench.engine.answer["admit"] = Refusal("kv_full", 0.25)
        let(bench, Event.ADMIT)
        refused = bench.outbox.only("refused")
        assert (refused.reason, refused.retry_after_ms) == ("kv_full", 250)
        assert bench.outbox.kinds() == ["refused"] and not bench.commands.legs and not bench.ended

    run(check)


def test_a_draining_worker_refuses_what_is_new_and_ends_what_runs():
    def check(bench):
        let(bench, Event.ADMIT)
        bench.commands.is_draining = True
        other = pb.Key(request_id="other")
        bench.obey(admit=pb.Admit(key=other, spec=make_spec()))
        assert bench.outbox.events[-1].refused.reason == "draining"
        let(bench, Event.PREFILL_HERE)
        assert bench.commands.legs[KEY].state is State.RUNNING

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
        let(bench, Event.ADMIT)
        stranger, key = OutboxDouble(), pb.Key(request_id=KEY[0], attempt=KEY[1])
        bench.obey(stranger, admit=pb.Admit(key=key, spec=make_spec()))
        bench.obey(stranger, cancel=pb.Cancel(key=key))
        bench.obey(stranger, start=pb.Start(key=key))
        assert stranger.kinds() == ["refused"] and stranger.only("refused").reason == "in_use"
        assert bench.commands.legs[KEY].state is State.ADMITTED
        bench.commands.on_stream_lost(stranger)
        assert bench.commands.legs[KEY].state is State.ADMITTED

    run(check)


def test_a_cancelled_fetch_gives_its_blocks_up_before_it_is_stopped():
    def check(bench):
        let(bench, Event.ADMIT)
        let(bench, Event.FETCH)
        bench.engine.calls.clear()
        let(bench, Event.CANCEL)
        assert bench.engine.calls == [("cancel", KEY)] and bench.intake.stopped == [KEY]
        bench.engine_ends(KEY, "cancelled")
        assert "ended" not in bench.outbox.kinds(), "bytes may still land"
        bench.intake.end(KEY, Status(1, "CANCELLED"))
        assert bench.outbox.only("ended").code == 1

    run(check)


def test_the_engine_says_why_a_fetch_had_no_place():
    """The loop ended the key (its deadline) while bytes were on their way."""

    def check(bench):
        let(bench, Event.ADMIT)
        let(bench, Event.FETCH)
        bench.intake.end(KEY, None)
        bench.engine_ends(KEY, "deadline")
        assert bench.outbox.only("ended").code == 4

    run(check)


def test_start_after_the_engine_ended_it():
    def check(bench):
        for step in PATHS[State.FETCHED]:
            let(bench, step)
        bench.engine.answer["start"] = LookupError("gone")
        let(bench, Event.START)
        bench.engine_ends(KEY, "deadline")
        assert bench.outbox.only("ended").code == 4

    run(check)


def test_a_failed_offer_gives_the_blocks_back():
    def check(bench):
        def refuse(*args):
            raise ValueError("a taker of another shape")

        bench.handoff.lease_prompt = refuse
        let(bench, Event.PREFILL)
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
        let(bench, Event.PREFILL_HERE)
        run_ = TokenRun(KEY, 0, 1, (4, 5))
        report = DecodeReport(0.1, 0.2, 0.3, 4, 5)
        bench.commands.on_outputs([DONE, run_, RequestEnded(KEY, report=report)])
        assert bench.outbox.kinds() == ["done", "ended"] and bench.outbox.runs == [run_]
        decode = bench.outbox.only("ended").decode
        assert (decode.num_steps, decode.num_preemptions) == (4, 5)
        assert bench.ended[0].num_output_tokens == 3

    run(check)


def bring_to(bench: Bench, state: State) -> None:
    for step in PATHS[state]:
        let(bench, step)


def test_tokens_of_a_step_that_was_under_way_are_not_lost():
    def check(bench):
        bring_to(bench, State.ORPHANED)
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
        bring_to(bench, State.ORPHANED)
        last = TokenRun(KEY, 0, 1, (5,), finish_reason=FinishReason.LENGTH)
        bench.commands.on_outputs([last, RequestEnded(KEY)])
        assert bench.leg(KEY).state is State.ORPHANED
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
        bring_to(bench, State.ORPHANED)
        bench.obey(bench.other, attach=attach(**fields))
        assert bench.other.kinds() == ["not_here"]
        assert bench.leg(KEY).state is State.ORPHANED

    run(check)


def test_nobody_comes():
    async def main():
        bench = Bench(resume_window_s=0.05)
        bring_to(bench, State.ORPHANED)
        while not bench.engine.count("cancel"):
            await asyncio.sleep(0.005)
        bench.engine_ends(KEY, "cancelled")
        assert not bench.commands.legs and bench.ended[0].status.reason == "STREAM_LOST"

    asyncio.run(main())


def test_a_prompt_that_is_still_read_here_is_not_parked():
    def check(bench):
        let(bench, Event.PREFILL_HERE)
        let(bench, Event.STREAM_LOST)
        assert bench.leg(KEY).state is State.ENDING and not bench.engine.count("park")

    run(check)


def test_a_parked_sequence_meets_the_deadline_of_who_attached():
    async def main():
        bench = Bench()
        bring_to(bench, State.ORPHANED)
        bench.obey(bench.other, attach=attach(budget_ms=30))
        while not bench.engine.count("cancel"):
            await asyncio.sleep(0.005)
        bench.engine_ends(KEY, "cancelled")
        assert bench.other.only("ended").code == 4

    asyncio.run(main())
