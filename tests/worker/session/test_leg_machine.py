"""Keys beyond single cells: orders of events that once lost an end, a block or a token."""

import asyncio
from dataclasses import replace

import pytest

from baton.engine.core.request import (
    DecodeReport,
    FinishReason,
    Key,
    Refusal,
    RequestEnded,
    TokenRun,
    Waits,
)
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.states import LegEvent, LegState
from baton.worker.wire.end_status import Status
from kvtransfer.transfer.leases import LeaseEnding
from tests.support.engine.toy_engine import toy_engine
from tests.support.worker.fakes import FakeOutbox, LegMachineHarness, numbered_spec
from tests.support.worker.key_paths import DONE, KEY, OTHER, PATHS, attach, bring_to, make_happen, run_with_harness


def test_a_draining_worker_refuses_what_is_new_and_ends_what_runs():
    def check(harness):
        make_happen(harness, LegEvent.ADMIT)
        harness.dispatcher.start_draining()
        other = pb.Key(request_id="other")
        harness.dispatch(admit=pb.Admit(key=other, spec=numbered_spec()))
        assert harness.outbox.events[-1].refused.reason == "draining"
        make_happen(harness, LegEvent.PREFILL_HERE)
        assert harness.dispatcher.legs[KEY].state is LegState.RUNNING

    run_with_harness(check)


@pytest.mark.parametrize("spec, names", [
    (numbered_spec(0), "num_prompt_tokens"),
    (numbered_spec(64, traceparent="x"), ""),
    (pb.RequestSpec(token_ids=[5000], num_prompt_tokens=1, max_tokens=1, budget_ms=9), "token_ids"),
    (numbered_spec(max_tokens=0), "max_tokens"),
])  # fmt: skip
def test_a_bad_command_ends_its_key_only(spec, names):
    def check(harness):
        if not names:
            del spec.span_hashes[:]
        harness.dispatch(admit=pb.Admit(key=pb.Key(request_id="bad"), spec=spec))
        ended = harness.outbox.only("ended")
        assert (ended.code, ended.reason) == (3, "BAD_COMMAND") and names in ended.message
        assert not harness.engine.calls and not harness.dispatcher.legs

    run_with_harness(check)


def test_a_budget_that_is_used_up_costs_nothing():
    def check(harness):
        harness.dispatch(admit=pb.Admit(key=pb.Key(request_id="late"), spec=numbered_spec(budget_ms=0)))
        assert harness.outbox.only("ended").code == 4
        assert not harness.engine.calls

    run_with_harness(check)


def test_a_grant_that_is_not_used_lapses():
    async def main():
        harness = LegMachineHarness()
        harness.dispatch(
            admit=pb.Admit(key=pb.Key(request_id=KEY[0], attempt=KEY[1]), spec=numbered_spec(budget_ms=200))
        )
        while not harness.engine.count("cancel"):
            await asyncio.sleep(0.005)
        harness.come_home(KEY)
        assert harness.outbox.only("ended").code == 4

    asyncio.run(main())


@pytest.mark.parametrize("event", [LegEvent.CANCEL, LegEvent.DEADLINE, LegEvent.GRACE_OVER])
@pytest.mark.parametrize("state", [LegState.PREFILLING, LegState.HELD])
def test_blocks_are_given_back_when_their_lease_is_over(state, event):
    """A rank that has not heard yet could confirm what another request has written there."""

    def check(harness):
        harness.handoff.cancel = lambda leg: None  # the ranks have not answered
        bring_to(harness, state)
        make_happen(harness, event)
        assert not harness.engine.count("cancel")
        harness.handoff.end(KEY, LeaseEnding.CANCELLED)
        assert harness.engine.count("cancel") == 1
        harness.come_home(KEY)
        assert harness.outbox.only("ended").code and not harness.dispatcher.legs

    run_with_harness(check)


def test_a_prompt_that_is_not_answered_is_granted_once_it_is_taken():
    """Its gateway lets the next in line ask; its end is not the first that it hears."""

    def check(harness):
        spec = numbered_spec()
        spec.pooling.SetInParent()
        key = pb.Key(request_id=KEY[0], attempt=KEY[1])
        harness.dispatch(prefill=pb.Prefill(key=key, spec=spec))
        assert harness.outbox.kinds() == ["granted"] and harness.outbox.only("granted").key == key
        assert harness.engine.count("submit") == 1

    run_with_harness(check)


def test_a_prompt_whose_adapter_has_no_slot_is_refused_at_once(monkeypatch):
    """Its adapter is made ready in a thread, for which the event loop does not wait."""

    def find(identity, in_use):
        raise Refusal("adapter_loading")

    def check(_):
        engine = toy_engine()
        monkeypatch.setattr(engine.adapters, "find", find)
        monkeypatch.setattr(engine.adapters, "wait", lambda identity: pytest.fail("the event loop waits"))
        harness, spec = LegMachineHarness(engine=engine), numbered_spec(adapter=bytes(32))
        spec.pooling.SetInParent()
        harness.dispatch(prefill=pb.Prefill(key=pb.Key(request_id="r"), spec=spec))
        assert harness.outbox.only("refused").reason == "adapter_loading" and not harness.dispatcher.legs

    run_with_harness(check)


def test_another_gateways_key_is_not_touched():
    def check(harness):
        make_happen(harness, LegEvent.ADMIT)
        stranger, key = FakeOutbox(), pb.Key(request_id=KEY[0], attempt=KEY[1])
        harness.dispatch(stranger, admit=pb.Admit(key=key, spec=numbered_spec()))
        harness.dispatch(stranger, cancel=pb.Cancel(key=key))
        harness.dispatch(stranger, start=pb.Start(key=key))
        assert stranger.kinds() == ["refused"] and stranger.only("refused").reason == "in_use"
        assert harness.dispatcher.legs[KEY].state is LegState.ADMITTED
        harness.dispatcher.on_stream_lost(stranger)
        assert harness.dispatcher.legs[KEY].state is LegState.ADMITTED

    run_with_harness(check)


def test_a_cancelled_fetch_gives_its_blocks_up_before_it_is_stopped():
    def check(harness):
        make_happen(harness, LegEvent.ADMIT)
        make_happen(harness, LegEvent.FETCH)
        harness.engine.calls.clear()
        make_happen(harness, LegEvent.CANCEL)
        assert harness.engine.calls == [("cancel", KEY)] and harness.intake.stopped == [KEY]
        harness.engine_ends(KEY, "cancelled")
        assert "ended" not in harness.outbox.kinds(), "bytes may still land"
        harness.intake.end(KEY, Status(1, "CANCELLED"))
        assert harness.outbox.only("ended").code == 1

    run_with_harness(check)


def test_the_engine_says_why_a_fetch_had_no_place():
    """The loop ended the key (its deadline) while bytes were on their way."""

    def check(harness):
        make_happen(harness, LegEvent.ADMIT)
        make_happen(harness, LegEvent.FETCH)
        harness.intake.end(KEY, None)
        harness.engine_ends(KEY, "deadline")
        assert harness.outbox.only("ended").code == 4

    run_with_harness(check)


def test_start_after_the_engine_ended_it():
    def check(harness):
        for step in PATHS[LegState.FETCHED]:
            make_happen(harness, step)
        harness.engine.answer["start"] = LookupError("gone")
        make_happen(harness, LegEvent.START)
        harness.engine_ends(KEY, "deadline")
        assert harness.outbox.only("ended").code == 4

    run_with_harness(check)


def test_a_failed_offer_gives_the_blocks_back():
    def check(harness):
        def refuse(*args):
            raise ValueError("a taker of another shape")

        harness.handoff.lease_prompt = refuse
        make_happen(harness, LegEvent.PREFILL)
        assert ("cancel", KEY) in harness.engine.calls
        harness.engine_ends(KEY, "cancelled")
        assert harness.outbox.only("ended").code == 3

    run_with_harness(check)


def test_not_here_is_the_whole_answer():
    def check(harness):
        offer = pb.Offer(key=pb.Key(request_id="chain"), budget_ms=1000)
        offer.spans.hashes.extend([b"h" * 32, b"i" * 32])
        harness.dispatch(offer=offer)
        assert not harness.outbox.events, "its blocks are still leased"
        harness.engine_ends(Key("chain"), "cancelled")
        assert harness.outbox.only("not_here").num_matched_tokens == 64 and harness.outbox.kinds() == ["not_here"]

    run_with_harness(check)


def test_done_goes_out_before_the_tokens_and_ended_after_them():
    def check(harness):
        make_happen(harness, LegEvent.PREFILL_HERE)
        run_ = TokenRun(KEY, 0, 1, (4, 5))
        report = DecodeReport(0.1, 0.2, 0.3, 4, 5, waits=Waits(0.02, 0.01))
        harness.dispatcher.on_outputs([DONE, run_, RequestEnded(KEY, report=report)])
        assert harness.outbox.kinds() == ["done", "ended"] and harness.outbox.runs == [run_]
        decode = harness.outbox.only("ended").decode
        assert (decode.num_steps, decode.num_preemptions) == (4, 5)
        assert (decode.waits.place_s, decode.waits.block_s) == (0.02, 0.01)
        assert harness.ended[0].num_output_tokens == 3

    run_with_harness(check)


def test_tokens_of_a_step_that_was_under_way_are_not_lost():
    def check(harness):
        bring_to(harness, LegState.ORPHANED)
        harness.dispatcher.on_outputs([TokenRun(KEY, 0, 1, (5, 6))])
        assert not harness.outbox.runs
        harness.dispatch(harness.other, attach=attach(next_index=[1]))
        harness.dispatcher.on_outputs([TokenRun(KEY, 0, 3, (8,)), RequestEnded(KEY)])
        runs = [(run.key, run.first_index, run.token_ids) for run in harness.other.runs]
        assert runs == [(OTHER, 1, (5, 6)), (OTHER, 3, (8,))]
        assert harness.other.only("ended").code == 0 and not harness.dispatcher.legs

    run_with_harness(check)


def test_a_sequence_that_had_ended_is_read_to_its_end():
    def check(harness):
        bring_to(harness, LegState.ORPHANED)
        last = TokenRun(KEY, 0, 1, (5,), finish_reason=FinishReason.LENGTH)
        harness.dispatcher.on_outputs([last, RequestEnded(KEY)])
        assert harness.leg(KEY).state is LegState.ORPHANED
        harness.dispatch(harness.other, attach=attach())
        (told,) = harness.other.runs
        assert (told.token_ids, told.finish_reason) == ((7, 5), FinishReason.LENGTH)
        assert harness.other.only("ended").code == 0
        assert not harness.engine.count("resume") and not harness.dispatcher.legs

    run_with_harness(check)


@pytest.mark.parametrize("fields", [
    {"fingerprint": b"another request"},
    {"previous_attempt": 7},
    {"next_index": [2]},  # more than it has
    {"next_index": [0, 0]},
    {"key": Key("two", 2)},
], ids=str)  # fmt: skip
def test_only_the_same_request_is_gone_on_with(fields):
    def check(harness):
        bring_to(harness, LegState.ORPHANED)
        harness.dispatch(harness.other, attach=attach(**fields))
        assert harness.other.kinds() == ["not_here"]
        assert harness.leg(KEY).state is LegState.ORPHANED

    run_with_harness(check)


def test_nobody_comes():
    async def main():
        harness = LegMachineHarness(resume_window_s=0.05)
        bring_to(harness, LegState.ORPHANED)
        while not harness.engine.count("cancel"):
            await asyncio.sleep(0.005)
        harness.engine_ends(KEY, "cancelled")
        assert not harness.dispatcher.legs and harness.ended[0].status.reason == "STREAM_LOST"

    asyncio.run(main())


def test_a_prompt_that_is_still_read_here_is_not_parked():
    def check(harness):
        make_happen(harness, LegEvent.PREFILL_HERE)
        make_happen(harness, LegEvent.STREAM_LOST)
        assert harness.leg(KEY).state is LegState.ENDING and not harness.engine.count("park")

    run_with_harness(check)


def test_a_parked_sequence_meets_the_deadline_of_who_attached():
    async def main():
        harness = LegMachineHarness()
        bring_to(harness, LegState.ORPHANED)
        harness.dispatch(harness.other, attach=attach(budget_ms=30))
        while not harness.engine.count("cancel"):
            await asyncio.sleep(0.005)
        harness.engine_ends(KEY, "cancelled")
        assert harness.other.only("ended").code == 4

    asyncio.run(main())


@pytest.mark.parametrize("event", [LegEvent.STREAM_LOST, LegEvent.ATTACH])
def test_what_a_leg_waited_for_is_forgotten_when_it_waits_for_something_else(event):
    """The deadline before it was lost, or the window in which a gateway may come back."""

    def check(harness):
        bring_to(harness, LegState.RUNNING if event is LegEvent.STREAM_LOST else LegState.ORPHANED)
        before = harness.leg(KEY).timer
        make_happen(harness, event)
        assert before.cancelled() and not harness.leg(KEY).timer.cancelled()

    run_with_harness(check)


def test_a_key_that_cannot_be_given_back_takes_none_along(caplog):
    """What came with its output for other keys was lost."""

    def check(harness):
        other = Key("other", 1)
        for key in (KEY, other):
            name = pb.Key(request_id=key.request_id, attempt=key.attempt)
            harness.dispatch(admit=pb.Admit(key=name, spec=numbered_spec(), prefill=True))
            harness.dispatcher.on_outputs([replace(DONE, key=key)])
        harness.engine.answer["cancel"] = RuntimeError("a block that nobody holds")
        harness.leg(KEY).record = None  # its tokens find no place
        runs = [TokenRun(key, 0, 1, (7,), (), None) for key in (KEY, other)]
        harness.dispatcher.on_outputs(runs)
        assert harness.outbox.runs == runs[1:]
        assert harness.leg(KEY).state is LegState.ENDING and "a block that nobody holds" in caplog.text
        harness.engine_ends(KEY)
        assert harness.outbox.only("ended").key.request_id == KEY.request_id
        harness.come_home(other)

    run_with_harness(check)
