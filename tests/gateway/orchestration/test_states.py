"""Every cell of the table: a request is brought into the state, the event happens, and in the end nothing is left."""

import ast
import asyncio
from pathlib import Path

import grpc
import pytest

import gateway.orchestration.pipeline
from baton.v1 import inference_pb2 as pb2
from baton.v1 import worker_pb2 as pb
from gateway.attempts.reattach import AttachReply
from gateway.link.mailbox import Lost, Stalled, Tokens
from gateway.orchestration.answer_actions import expect_report
from gateway.orchestration.ending_actions import end_answered
from gateway.orchestration.machine import ForbiddenTransition, RequestMachine
from gateway.orchestration.states import RequestEvent
from gateway.orchestration.timeouts import TIMEOUTS
from gateway.orchestration.transitions import TABLE, RequestTransition, ignore
from gateway.request.request_state import RequestState
from tests.gateway.calls import PROMPT, generate, ids_of
from tests.support.gateway.fake_worker import tokens_of
from tests.support.pace import patience

MAX_TOKENS = 4
EXPECTED = tokens_of(PROMPT, MAX_TOKENS, 400)
# What holds a request in the state.
HOLDS = {
    RequestState.ADMITTING: ("decode", "admit"),
    RequestState.PREFILLING: ("prefill", "accept"),
    RequestState.FETCHING: ("prefill", "prefill"),
    RequestState.DECODING: ("decode", "decode"),
    RequestState.ATTACHING: ("decode", "attach"),
    RequestState.ENDING: ("decode", "end"),
}
REFUSALS = {RequestState.AWAITING_CREDIT: "decode", RequestState.AWAITING_PREFILL: "prefill"}
LIVE = [state for state in RequestState if state is not RequestState.ENDED]


def message_of(event: RequestEvent):
    """Return the message of a worker with this event."""
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


async def bring_to(c, state: RequestState) -> None:
    if state in REFUSALS:
        for worker in getattr(c, REFUSALS[state]):
            worker.refusals = ["kv_full"] * 100_000
    else:
        role, gate = HOLDS[state]
        for worker in getattr(c, role):
            worker.hold(gate)


def let_go(c) -> None:
    for worker in c.workers:
        worker.refusals = []
        for gate in ("admit", "accept", "prefill", "fetch", "attach", "decode", "end"):
            worker.release(gate)


def machines_made(monkeypatch) -> list[RequestMachine]:
    made: list[RequestMachine] = []

    def remembered(request) -> RequestMachine:
        made.append(RequestMachine(request))
        return made[-1]

    monkeypatch.setattr(gateway.orchestration.pipeline, "RequestMachine", remembered)
    return made


@pytest.mark.parametrize("event", RequestEvent, ids=lambda event: event.value.replace(" ", "-"))
@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.value.replace(" ", "-"))
async def test_every_event_in_every_state(cluster, monkeypatch, state, event):
    made = machines_made(monkeypatch)
    async with cluster(num_prefill=2, num_decode=2) as c:
        await bring_to(c, state)
        resumed = {}
        if state is RequestState.ATTACHING:
            resumed = {"request_id": "again", "seed": 1, "resume_from": [0]}
            c.park("again", PROMPT, max_tokens=MAX_TOKENS, seed=1)
        running = asyncio.create_task(generate(c, max_tokens=MAX_TOKENS, **resumed))
        await c.until(lambda: made and made[0].state is state)
        machine, cell = made[0], TABLE[state, event]
        request = machine.request
        if (state, event) == (RequestState.DECODING, RequestEvent.FINISHED):  # it happens only once it is so
            request.answer.push(0, 1, EXPECTED[1:], (), pb2.FINISH_REASON_LENGTH)
        if state is RequestState.ATTACHING:
            await c.until(lambda: any("attach" in worker.kinds() for worker in c.decode))
            machine.happen(event, AttachReply(next(iter(request.reattach._legs)), message_of(event)))
        else:
            machine.happen(event, message_of(event))
        assert machine.state in cell.states
        if machine.state is RequestState.ENDED:
            request.post_capacity()  # its reader looks up: in life it was the reader that brought the event
        let_go(c)
        try:
            assert ids_of(await running) == EXPECTED
        except grpc.aio.AioRpcError as error:
            assert RequestState.ENDED in cell.states, error
            assert error.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        else:
            assert cell.states != (RequestState.ENDED,) or cell.action is end_answered
        await c.idle()


def test_the_table_is_whole():
    assert set(TABLE) == {(state, event) for state in RequestState for event in RequestEvent}
    for cell in TABLE.values():
        assert callable(cell.action) and cell.action.__doc__ and len(cell.states) == len(set(cell.states)) > 0
    ended = RequestTransition(ignore, (RequestState.ENDED,))
    assert {TABLE[RequestState.ENDED, event] for event in RequestEvent} == {ended}
    assert all(
        TABLE[state, event].states == (RequestState.ENDED,)
        for state in LIVE
        for event in (RequestEvent.CANCEL, RequestEvent.DEADLINE)
    )


def test_every_state_but_the_last_has_a_timeout():
    assert [*TIMEOUTS] == [state for state in RequestState if state in LIVE]
    assert all(timeout.due.__doc__ and timeout.expire.__doc__ for timeout in TIMEOUTS.values())


def test_what_raises_may_end():
    """An action whose docstring says that it raises is in no cell that cannot lead to the end, and the other way
    round."""
    for (state, event), cell in TABLE.items():
        if cell.action not in (end_answered, expect_report, ignore):
            assert ("Raises" in cell.action.__doc__) == (RequestState.ENDED in cell.states), (state, event)


def test_the_state_is_set_in_one_place():
    set_in = []
    for path in sorted(Path(gateway.orchestration.__file__).parent.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                targets = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
                if any(node.attr == "state" and isinstance(node.ctx, ast.Store) for node in targets):
                    set_in.append(f"{path.stem}.{function.name}")
    assert set_in == ["machine.__init__", "machine._enter"]


async def test_a_state_that_the_cell_does_not_list_is_an_error(cluster, monkeypatch):
    made = machines_made(monkeypatch)
    async with cluster(num_prefill=2, num_decode=2) as c:
        await bring_to(c, RequestState.DECODING)
        running = asyncio.create_task(generate(c, max_tokens=MAX_TOKENS))
        await c.until(lambda: made and made[0].state is RequestState.DECODING)
        wrong = RequestTransition(lambda request, event: RequestState.FETCHING, (RequestState.DECODING,))
        monkeypatch.setitem(TABLE, (RequestState.DECODING, RequestEvent.OTHER), wrong)
        with pytest.raises(ForbiddenTransition, match="other while decoding has led to fetching"):
            made[0].happen(RequestEvent.OTHER)
        let_go(c)
        assert ids_of(await running) == EXPECTED
        await c.idle()


@pytest.mark.parametrize(
    "state", [RequestState.ADMITTING, RequestState.AWAITING_PREFILL], ids=lambda state: state.value
)
async def test_what_comes_before_the_news_that_its_decode_worker_is_lost(cluster, monkeypatch, state):
    """It is still in the mailbox, and the link has no Hello any more."""
    made = machines_made(monkeypatch)
    async with cluster(num_prefill=2, num_decode=2) as c:
        await bring_to(c, state)
        running = asyncio.create_task(generate(c, max_tokens=MAX_TOKENS))
        await c.until(lambda: made and made[0].state is state)
        request = made[0].request
        link = request.attempt.decode.link
        if state is RequestState.ADMITTING:
            request.mailbox.post(request.attempt.decode, pb.Granted())
        else:
            request.post_capacity()
        link.lose("gone")
        link.session.hang_up("a test ends it")
        let_go(c)
        assert ids_of(await running) == EXPECTED
        assert request.record.num_attempts == 2
        assert not any(each.legs or each.num_prefill_tokens for each in c.gateway.registry.links)


async def test_an_offer_is_answered_when_the_decode_worker_is_lost(cluster, monkeypatch):
    made = machines_made(monkeypatch)
    async with cluster(num_prefill=2, num_decode=2) as c:
        await bring_to(c, RequestState.PREFILLING)
        running = asyncio.create_task(generate(c, max_tokens=MAX_TOKENS))
        await c.until(lambda: made and made[0].state is RequestState.PREFILLING)
        request = made[0].request
        link = request.attempt.decode.link
        link.lose("gone")
        request.attempt._send_prefill([], None)  # by its timer, or by the one that holds a prefix
        link.session.hang_up("a test ends it")
        let_go(c)
        assert ids_of(await running) == EXPECTED
        assert not any(each.legs or each.num_prefill_tokens for each in c.gateway.registry.links)


async def test_a_decode_worker_does_not_read_what_it_has_granted(cluster, monkeypatch):
    made = machines_made(monkeypatch)
    async with cluster(num_prefill=0, num_decode=2) as c:
        for worker in c.decode:
            worker.hold("prefill")
        running = asyncio.create_task(generate(c, max_tokens=MAX_TOKENS))
        await c.until(lambda: made and made[0].state is RequestState.PREFILLING)
        machine = made[0]
        machine.happen(RequestEvent.REFUSED, pb.Refused(reason="in_use", retry_after_ms=20))
        assert machine.state is RequestState.AWAITING_CREDIT
        let_go(c)
        assert ids_of(await running) == EXPECTED
        assert all(worker.kinds()[0] == "admit" for worker in c.decode)
        await c.idle()


async def test_a_fetch_in_doubt_does_not_keep_an_answer_from_its_end(cluster, monkeypatch):
    made = machines_made(monkeypatch)
    async with cluster() as c:
        await bring_to(c, RequestState.ENDING)
        running = asyncio.create_task(generate(c, max_tokens=MAX_TOKENS))
        await c.until(lambda: made and made[0].state is RequestState.ENDING)
        attempt = made[0].request.attempt
        attempt.kv_fetch.is_done, attempt.kv_fetch.give_up_at = False, 0.0
        async with asyncio.timeout(patience(5)):
            assert ids_of(await running) == EXPECTED
        let_go(c)
        await c.idle()


async def test_the_last_tokens_and_the_report_come_at_once(cluster, monkeypatch):
    """Read in one go, as from a busy loop: the request is over, nothing is lost with the leg."""
    made = machines_made(monkeypatch)
    async with cluster(num_prefill=2, num_decode=2) as c:
        await bring_to(c, RequestState.DECODING)
        running = asyncio.create_task(generate(c, max_tokens=MAX_TOKENS))
        await c.until(lambda: made and made[0].state is RequestState.DECODING)
        request = made[0].request
        request.mailbox.post(request.attempt.decode, Tokens(0, 1, EXPECTED[1:], [], pb2.FINISH_REASON_LENGTH))
        request.mailbox.post(request.attempt.decode, pb.Ended())
        assert ids_of(await running) == EXPECTED
        assert request.record.num_attempts == 1
        let_go(c)
        await c.idle()
