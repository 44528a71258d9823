"""Every cell of the table: a request is brought into the phase, the event happens, and in the end nothing is left."""

import asyncio

import grpc
import pytest

import gateway.orchestration.pipeline
from baton.v1 import inference_pb2 as pb2
from baton.v1 import worker_pb2 as pb
from gateway.link.mailbox import Lost, Stalled, Tokens
from gateway.orchestration.attempts import Attempts
from gateway.orchestration.states import TABLE, Phase, RequestEvent, state_table_markdown
from tests.gateway.orchestration.test_answers import PROMPT, generate, ids_of
from tests.support.gateway.fake_worker import tokens_of

MAX_TOKENS = 4
EXPECTED = tokens_of(PROMPT, MAX_TOKENS, 400)
# What holds a request in the phase.
HOLDS = {
    Phase.ADMITTING: ("decode", "admit"),
    Phase.PREFILLING: ("prefill", "accept"),
    Phase.FETCHING: ("prefill", "prefill"),
    Phase.DECODING: ("decode", "decode"),
    Phase.ATTACHING: ("decode", "attach"),
    Phase.ENDING: ("decode", "end"),
}
REFUSALS = {Phase.AWAITING_CREDIT: "decode", Phase.AWAITING_PREFILL: "prefill"}
LIVE = [phase for phase in Phase if phase is not Phase.ENDED]
# An action may lead on at once: to another worker, out of the line, or to the end.
LEADS_ON = {
    "try_again": {Phase.ADMITTING, Phase.AWAITING_CREDIT, Phase.ENDED},
    "await_credit": {Phase.AWAITING_CREDIT},
    "ask_for_prefill": {Phase.PREFILLING, Phase.AWAITING_PREFILL},
    "await_report": {Phase.ENDING, Phase.ENDED},
    "reattach": {Phase.ATTACHING, Phase.ADMITTING},
    "ask_again": {Phase.ATTACHING, Phase.ADMITTING},
    "ask_others": {Phase.ATTACHING, Phase.ADMITTING},
    "begin_anew": {Phase.ADMITTING, Phase.AWAITING_CREDIT},
    "leave_stalled": {Phase.ADMITTING, Phase.AWAITING_CREDIT},
}


def subject(event: RequestEvent):
    """What comes with the event, as a worker would say it."""
    first = pb.FirstToken(choice=0, token_id=EXPECTED[0])
    return {
        RequestEvent.GRANTED: pb.Granted(),
        RequestEvent.REFUSED: pb.Refused(reason="kv_full", retry_after_ms=20),
        RequestEvent.ACCEPTED: pb.Accepted(lease_id=b"?", handle=b"of nobody", ticket=b"?"),
        RequestEvent.DONE: pb.Done(first_tokens=[first]),
        RequestEvent.FETCHED: pb.Fetched(transfer_s=0.1),
        RequestEvent.TOKENS: Tokens(0, 0, EXPECTED[:1], [], 0),
        RequestEvent.DECODE_ENDED: pb.Ended(),
        RequestEvent.PREFILL_ENDED: pb.Ended(),
        RequestEvent.DECODE_FAILED: pb.Ended(code=13, reason="WHY", message="why"),
        RequestEvent.PREFILL_FAILED: pb.Ended(code=13, reason="WHY", message="why"),
        RequestEvent.DECODE_LOST: Lost("gone"),
        RequestEvent.PREFILL_LOST: Lost("gone"),
        RequestEvent.DECODE_STALLED: Stalled(),
        RequestEvent.PREFILL_STALLED: Stalled(),
    }.get(event)


async def bring_to(c, phase: Phase) -> None:
    if phase in REFUSALS:
        for worker in getattr(c, REFUSALS[phase]):
            worker.refusals = ["kv_full"] * 100_000
    else:
        role, gate = HOLDS[phase]
        for worker in getattr(c, role):
            worker.hold(gate)


def let_go(c) -> None:
    for worker in c.workers:
        worker.refusals = []
        for gate in ("admit", "accept", "prefill", "fetch", "attach", "decode", "end"):
            worker.release(gate)


@pytest.mark.parametrize("event", RequestEvent, ids=lambda event: event.value.replace(" ", "-"))
@pytest.mark.parametrize("phase", LIVE, ids=lambda phase: phase.value.replace(" ", "-"))
async def test_cell(cluster, monkeypatch, phase, event):
    made = []
    monkeypatch.setattr(
        gateway.orchestration.pipeline, "Attempts", lambda *args: made.append(Attempts(*args)) or made[0]
    )
    async with cluster(num_prefill=2, num_decode=2) as c:
        await bring_to(c, phase)
        resumed = {}
        if phase is Phase.ATTACHING:
            resumed = {"request_id": "again", "seed": 1, "resume_from": [0]}
            c.park("again", PROMPT, max_tokens=MAX_TOKENS, seed=1)
        running = asyncio.create_task(generate(c, max_tokens=MAX_TOKENS, **resumed))
        await c.until(lambda: made and made[0].phase is phase)
        attempts, cell = made[0], TABLE[phase, event]
        if (phase, event) == (Phase.DECODING, RequestEvent.FINISHED):  # nobody says so before it is so
            attempts._answer.push(0, 1, EXPECTED[1:], (), pb2.FINISH_REASON_LENGTH)
        if phase is Phase.ATTACHING:
            await c.until(lambda: any("attach" in worker.kinds() for worker in c.decode))
            attempts.happen(event, next(iter(attempts._attaching._legs)))
        else:
            attempts.happen(event, subject(event))
        assert attempts.phase in LEADS_ON.get(cell.action, {cell.phase})
        if attempts.phase is Phase.ENDED:
            attempts._call_room()  # its reader looks up: in life it was the reader that brought the event
        let_go(c)
        try:
            assert ids_of(await running) == EXPECTED
        except grpc.aio.AioRpcError as error:
            assert cell.phase is Phase.ENDED or cell.action in LEADS_ON, error
            assert error.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        else:
            assert cell.phase is not Phase.ENDED or cell.action == "end_ok"
        await c.idle()


def test_the_table_is_whole():
    assert set(TABLE) == {(phase, event) for phase in Phase for event in RequestEvent}
    for cell in TABLE.values():
        assert hasattr(Attempts, f"_{cell.action}")
    assert {TABLE[Phase.ENDED, event] for event in RequestEvent} == {("ignore", Phase.ENDED)}
    assert all(
        TABLE[phase, event].phase is Phase.ENDED
        for phase in LIVE
        for event in (RequestEvent.CANCEL, RequestEvent.DEADLINE)
    )
    assert state_table_markdown().count("\n") == len(RequestEvent) + 1


async def test_the_last_tokens_and_the_report_come_at_once(cluster, monkeypatch):
    """Read in one go, as from a busy loop: the request is over, nothing is lost with the leg."""
    made = []
    monkeypatch.setattr(
        gateway.orchestration.pipeline, "Attempts", lambda *args: made.append(Attempts(*args)) or made[0]
    )
    async with cluster(num_prefill=2, num_decode=2) as c:
        await bring_to(c, Phase.DECODING)
        running = asyncio.create_task(generate(c, max_tokens=MAX_TOKENS))
        await c.until(lambda: made and made[0].phase is Phase.DECODING)
        attempts = made[0]
        attempts._mailbox.post(attempts._decode, Tokens(0, 1, EXPECTED[1:], [], pb2.FINISH_REASON_LENGTH))
        attempts._mailbox.post(attempts._decode, pb.Ended())
        assert ids_of(await running) == EXPECTED
        assert attempts._record.num_attempts == 1
        let_go(c)
        await c.idle()
