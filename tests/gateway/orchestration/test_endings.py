"""Cancels, losses, refusals and deadlines in every phase; nothing is left on any worker."""

import asyncio
import re
import time

import grpc
import pytest
from grpc._cython import cygrpc

from baton.client.errors import read_call_error
from baton.service.clock import now
from baton.service.errors import DeadlineExceeded
from baton.v1 import fleet_pb2
from baton.v1 import inference_pb2 as pb
from gateway.api.request_handler import _ErrorMapping
from gateway.attempts import answer_timeout, kv_fetch
from gateway.link.mailbox import Mailbox
from gateway.orchestration.pipeline import Pipeline
from gateway.request.validation import validate
from tests.gateway.calls import (
    GATES,
    PROMPT,
    expect_refusal,
    generate,
    hold,
    holder,
    ids_of,
    read,
    release,
    start,
    wait_for_gate,
)
from tests.support.client import make_request
from tests.support.gateway.fake_worker import tokens_of
from tests.support.gateway.request_records import record
from tests.support.pace import patience


async def test_a_deadline_that_is_not_the_callers_is_told_where_it_ends(cluster):
    most_s, usual_s = patience(0.6), patience(0.5)
    # one less on a slow machine, as the call takes time to come
    cut = rf": of \d+ s asked for this gateway gives {most_s:g}"
    none = f": the request named no deadline, and has {usual_s:g} s here"
    async with cluster(max_timeout_s=most_s, default_timeout_s=usual_s) as c:
        hold(c, "decode")
        for timeout_s, told in ((patience(20), cut), (None, none)):
            error = await expect_refusal(c.stub.Complete(make_request(PROMPT, max_tokens=6), timeout=timeout_s))
            assert error.code.name == "DEADLINE_EXCEEDED"
            assert re.search(f"[^:]{told}$", error.message), error.message


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_goes_leaves_nothing_held(cluster, gate, n):
    async with cluster() as c:
        hold(c, gate)
        call = c.stub.Generate(make_request(PROMPT, max_tokens=6, n=n), timeout=patience(20))
        await wait_for_gate(c, gate)
        call.cancel()
        await c.until(lambda: not any(link.legs for link in c.gateway.registry.links))
        release(c, gate)
        await c.idle()
        assert not any(kind == "cancel" and message.answered for kind, message in c.decode[0].commands)
        assert c.gateway.handler.num_running == 0
        assert len(await generate(c, max_tokens=2)) >= 1


@pytest.mark.parametrize("gate", GATES)
async def test_the_deadline_passes(cluster, gate):
    async with cluster() as c:
        hold(c, gate)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(c.stub.Generate(make_request(PROMPT, max_tokens=6), timeout=patience(0.5)))
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        release(c, gate)
        await c.idle()
        assert [each.how for each in c.gateway.recent.last] == [("failed", "DEADLINE_EXCEEDED")]


async def test_the_default_timeout_ends_a_call_and_names_its_phase(cluster):
    async with cluster(default_timeout_s=1.0) as c:
        hold(c, "prefill")
        said = await expect_refusal(read(c.stub.Generate(make_request(PROMPT, max_tokens=6))))
        assert said.code == grpc.StatusCode.DEADLINE_EXCEEDED and "fetching" in said.message
        await c.idle()


@pytest.mark.parametrize("is_fault", [False, True])
async def test_an_error_names_its_request_as_the_log_does(cluster, caplog, monkeypatch, is_fault):
    """Also to a client that has given it no id."""

    async def serve(*args):
        raise RuntimeError("a bug")

    async with cluster(default_timeout_s=patience(0.5)) as c:
        hold(c, "decode")
        if is_fault:
            monkeypatch.setattr(Pipeline, "serve", serve)
        caplog.set_level("INFO")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(c.stub.Generate(make_request(PROMPT)))
        error = read_call_error(caught.value)
        (line,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("request ended")]
        assert error.request_id and f"request_id={error.request_id} " in line and f"reason={error.reason} " in line


@pytest.mark.parametrize("given", ["mine", "", "no id"])
@pytest.mark.parametrize(
    "method, request_",
    [
        ("Complete", make_request(PROMPT, max_tokens=0)),
        ("Complete", make_request(PROMPT, model="other")),
        ("Embed", pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")], model="other")),
        ("Embed", pb.EmbedRequest()),
        ("Score", pb.ScoreRequest(query="a", documents=["b"])),
    ],
)
async def test_a_request_that_is_refused_at_once_has_an_id_too(cluster, caplog, method, request_, given):
    """Its own, where that is one."""
    named = type(request_)()
    named.CopyFrom(request_)
    named.request_id = given
    async with cluster() as c:
        caplog.set_level("INFO")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(c.stub, method)(named, timeout=patience(20))
        request_id = read_call_error(caught.value).request_id
        assert request_id == given if given == "mine" else re.fullmatch("[0-9a-f]{24}", request_id)
        (line,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("request ended")]
        assert f"request_id={request_id} " in line and "phase=validating " in line
        (view,) = c.gateway.recent.listed(fleet_pb2.ListRequestsRequest(), 0).recent
        assert view.request_id == request_id


@pytest.mark.parametrize("asked_s, given_s", [(None, 600), (590, 590), (3000, 3000), (7000, 3600)])
async def test_how_long_an_answer_may_take(cluster, asked_s, given_s):
    """Ten minutes where the client names no deadline, as clients wait by default; an hour at most."""
    async with cluster() as c:
        await read(c.stub.Generate(make_request(PROMPT, max_tokens=2), timeout=asked_s))
        admit = next(message for kind, message in c.decode[0].commands if kind == "admit")
        most_s = given_s * 1.02 if asked_s == given_s else given_s  # gRPC rounds what a client names up to few digits
        assert given_s - patience(10) < admit.spec.budget_ms / 1e3 <= most_s


@pytest.mark.parametrize("gate", ["accept", "prefill", "fetch"])
async def test_the_prefill_worker_dies_and_another_takes_over(cluster, gate):
    async with cluster(num_prefill=2) as c:
        hold(c, gate)
        running = start(c)
        await wait_for_gate(c, gate)
        dead = holder(c, "prefill")
        await dead.stop()
        c.workers.remove(dead)
        release(c, gate)
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        await c.idle()


@pytest.mark.parametrize("gate", ["admit", "accept", "prefill", "fetch", "decode"])
@pytest.mark.parametrize("n", [1, 2])
async def test_the_decode_worker_dies_and_another_takes_over(cluster, gate, n):
    async with cluster(num_decode=2) as c:
        hold(c, gate)
        running = start(c, n=n)
        await wait_for_gate(c, gate)
        dead = holder(c, "decode")
        await dead.stop()
        c.workers.remove(dead)
        release(c, gate)
        messages = await running
        for index in range(n):
            assert ids_of(messages, index) == tokens_of(PROMPT, 6, 400, index)
        assert messages[-1].usage.prompt_tokens == 300
        await c.idle()


async def test_the_decode_worker_dies_in_mid_stream(cluster):
    """The other one gets prompt and output so far; no token is lost or repeated."""
    async with cluster(num_decode=2) as c:
        for worker in c.decode:
            worker.holds_at = 100
        call = c.stub.Generate(make_request(PROMPT, max_tokens=200), timeout=patience(20))
        messages = [await call.read() for _ in range(5)]
        dead = holder(c, "decode")
        other = next(worker for worker in c.decode if worker is not dead)
        other.holds_at = None
        await dead.stop()
        c.workers.remove(dead)
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert ids_of(messages) == tokens_of(PROMPT, 200, 400)
        admitted = next(message for kind, message in other.commands if kind == "admit")
        assert admitted.spec.num_prompt_tokens == 300 and len(admitted.spec.token_ids) > 300
        await c.idle()


async def test_two_that_die_in_mid_stream_have_not_died_of_it(cluster):
    async with cluster(num_decode=3) as c:
        for worker in c.decode:
            worker.holds_at = 50
        running = start(c, max_tokens=200)
        for holds_at in (100, None):
            await c.until(lambda: any(not worker._gates["decode"].is_set() for worker in c.decode))
            (dead,) = [worker for worker in c.decode if worker.held]
            c.workers.remove(dead)
            c.decode.remove(dead)
            for worker in c.decode:
                worker.holds_at = holds_at
            await dead.stop()
        assert ids_of(await running) == tokens_of(PROMPT, 200, 400)
        await c.idle()


async def test_nobody_can_take_over(cluster):
    async with cluster(max_start_wait_s=0) as c:
        hold(c, "decode")
        call = c.stub.Generate(make_request(PROMPT, max_tokens=6), timeout=patience(20))
        assert (await call.read()).token_ids
        await c.decode[0].stop()
        said = await expect_refusal(call.read())
        assert said.code == grpc.StatusCode.UNAVAILABLE and said.reason == "DECODE_WORKER_LOST"
        assert "after 1 tokens" in said.message and said.retry_after_s
        c.workers.remove(c.decode[0])
        await c.idle()


async def test_a_request_ends_as_poison_after_two_deaths(cluster):
    """Two workers that die with a request in their hands are enough; the second death may be seen a little late."""
    async with cluster(num_prefill=4) as c:
        hold(c, "prefill")
        running = start(c)
        num_dead = 0
        while not running.done():
            for dead in [worker for worker in c.prefill if worker.held]:
                dead.held.clear()
                await dead.stop()
                num_dead += 1
            await asyncio.sleep(0.01)
        said = await expect_refusal(running)
        assert num_dead <= 3
        assert said.code == grpc.StatusCode.ABORTED and said.reason == "POISON"


async def test_poison_that_kills_before_it_is_granted(cluster):
    """A decode worker reads the prompt as soon as it has granted credit, and may die of it before that is out; the next
    one is asked to read it."""
    async with cluster(0, 3) as c:
        hold(c, "admit")
        running = start(c)
        await c.until(lambda: any(worker.kinds() for worker in c.decode))
        first = holder(c, "decode")
        for worker in set(c.decode) - {first}:
            worker.hold("prefill")
            worker.release("admit")
        await first.stop()
        await c.until(lambda: any("prefill" in worker.kinds() for worker in c.decode))
        await next(worker for worker in c.decode if "prefill" in worker.kinds()).stop()
        said = await expect_refusal(running)
        assert said.code == grpc.StatusCode.ABORTED and said.reason == "POISON"


@pytest.mark.parametrize("reason, num_steps", [("ENGINE_FAILED", 2), ("STEP_FAILED", 4)])
async def test_poison_that_fails_steps(cluster, reason, num_steps):
    """Alone in a step a prompt is to blame for it; among others it may have been any of them."""
    async with cluster(num_prefill=4) as c:
        for worker in c.prefill:
            worker.failures["prefill"] = [(13, reason)]
        said = await expect_refusal(start(c))
        assert said.code == grpc.StatusCode.ABORTED and said.reason == "POISON"
        assert sum("prefill" in worker.kinds() for worker in c.prefill) == num_steps
        await c.idle()


async def test_poison_that_wedges_engines(cluster):
    async with cluster(num_decode=3) as c:
        hold(c, "decode")
        running = start(c)
        for _ in range(2):
            await c.until(lambda: any(worker.held and worker.state == "serving" for worker in c.decode))
            (wedged,) = [worker for worker in c.decode if worker.held and worker.state == "serving"]
            await c.until(lambda wedged=wedged: "start" in wedged.kinds())
            wedged.state = "stalled"
        await c.until(lambda: running.done() or all(worker.kinds() for worker in c.decode))
        release(c, "decode")
        said = await expect_refusal(running)
        assert said.code == grpc.StatusCode.ABORTED and said.reason == "POISON"
        assert sum("admit" in worker.kinds() for worker in c.decode) == 2
        await c.idle()


async def test_who_was_beside_a_poison_twice_is_innocent(cluster):
    async with cluster(num_prefill=3) as c:
        for worker in c.prefill[:2]:
            worker.failures["prefill"] = [(13, "STEP_FAILED")]
        assert ids_of(await start(c)) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_a_failed_transfer_is_tried_with_another_source(cluster):
    async with cluster(num_prefill=2) as c:
        c.decode[0].failures["fetch"] = [(15, "DIGEST_MISMATCH")]
        assert ids_of(await start(c)) == tokens_of(PROMPT, 6, 400)
        assert all("prefill" in worker.kinds() for worker in c.prefill)
        await c.idle()


async def test_the_same_failure_over_and_over_ends(cluster):
    async with cluster() as c:
        c.decode[0].failures["fetch"] = [(15, "DIGEST_MISMATCH")] * 9
        said = await expect_refusal(start(c))
        assert said.code == grpc.StatusCode.DATA_LOSS and said.reason == "DIGEST_MISMATCH"
        await c.idle()


@pytest.mark.parametrize("code, status", [(3, "INVALID_ARGUMENT"), (4, "DEADLINE_EXCEEDED")])
async def test_what_no_other_worker_would_change(cluster, code, status):
    async with cluster(num_prefill=2) as c:
        for worker in c.prefill:
            worker.failures["prefill"] = [(code, "WHY")]
        said = await expect_refusal(start(c))
        assert said.code == grpc.StatusCode[status] and said.reason == "WHY"
        assert sum("prefill" in worker.kinds() for worker in c.prefill) == 1
        await c.idle()


async def test_a_worker_comes_back_under_a_new_epoch(cluster):
    async with cluster() as c:
        await generate(c, max_tokens=2)
        worker, link = c.decode[0], c.gateway.registry.decode[0]
        before = link.worker_id
        await worker.stop()
        await c.until(lambda: not link.is_serving)
        assert before not in c.gateway.index._feeds
        worker.hello.epoch = worker.epoch = 7
        worker.spans.clear()
        worker.held.clear()
        await worker.start(worker.port)
        await c.until(lambda: link.is_serving)
        assert link.worker_id != before and link.worker_id in c.gateway.index._feeds
        assert ids_of(await generate(c, max_tokens=4)) == tokens_of(PROMPT, 4, 400)


async def test_a_prefill_worker_that_is_gone_leaves_the_decode_worker(cluster):
    async with cluster(split="auto") as c:
        await c.prefill[0].stop()
        await c.until(lambda: not c.gateway.registry.prefill[0].is_serving)
        assert ids_of(await start(c)) == tokens_of(PROMPT, 6, 400)
        assert c.decode[0].kinds() == ["admit"]


async def test_a_client_that_does_not_read(cluster, monkeypatch):
    """Its sequence ends as soon as the bound is passed; the worker is notified at once, whatever the client does."""
    async with cluster(max_unread_tokens=50) as c:
        c.decode[0].hold("decode")
        call = c.stub.Generate(make_request(PROMPT, max_tokens=700, n=4, logprobs=0), timeout=patience(20))
        await wait_for_gate(c, "decode")
        leg = next(iter(c.gateway.registry.decode[0].legs.values()))
        # The request's reader waits, as it would in a write.
        monkeypatch.setattr(Mailbox, "wait", lambda mailbox, until: asyncio.Event().wait())
        c.decode[0].release("decode")
        await c.until(lambda: "cancel" in c.decode[0].kinds())
        assert 50 < leg.num_unread <= 54
        await c.until(lambda: not c.decode[0].held)
        call.cancel()
        await c.idle()


async def test_what_a_client_has_read_counts_no_more(cluster):
    async with cluster(max_unread_tokens=200) as c:
        messages = await generate(c, max_tokens=100, n=4)
        assert [len(ids_of(messages, index)) for index in range(4)] == [100] * 4
        await c.idle()


@pytest.mark.parametrize("num_read", [0, 1, 5])
async def test_a_client_that_does_not_read_until_its_deadline(cluster, num_read):
    """Whichever token it leaves unread: the first, one amid them, or the last, which is written when all has come."""
    async with cluster() as c:
        model, messages = c.fleet.model, []

        async def emit(message) -> None:
            messages.append(message)
            if len(ids_of(messages)) > num_read:
                await asyncio.Event().wait()

        validated = validate(make_request(PROMPT, max_tokens=6), model)
        deadline = now() + patience(0.5)
        with pytest.raises(DeadlineExceeded, match="did not read"):
            await c.pipeline.serve(validated, model, deadline, record(), emit)
        assert now() >= deadline and len(ids_of(messages[:-1])) <= num_read < len(ids_of(messages))
        await c.idle()


async def test_a_gateway_that_stood_still_gives_its_workers_their_time_again(cluster, monkeypatch):
    """Nothing that it has to read tells of a worker that does not answer."""
    monkeypatch.setattr(answer_timeout, "_MOST_ANSWER_S", patience(0.3))
    async with cluster(num_decode=2) as c:
        hold(c, "admit")
        running = start(c)
        await wait_for_gate(c, "admit")
        time.sleep(patience(0.3) + 0.2)
        release(c, "admit")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        assert sum("admit" in worker.kinds() for worker in c.decode) == 1
        await c.idle()


@pytest.mark.parametrize("state", ["serving", "stalled"])
async def test_what_waits_to_be_taken_is_kept_for_longer(cluster, monkeypatch, state):
    """Also while the only decode worker says, more often than that, that it stands still."""
    monkeypatch.setattr(kv_fetch, "_RENEW_S", 0.5)
    async with cluster() as c:
        hold(c, "fetch")
        running = start(c)
        await wait_for_gate(c, "fetch")
        c.decode[0].state = state
        await c.until(lambda: c.prefill[0].kinds().count("renew_lease") >= 2)
        (handle,) = [message.handle for kind, message in c.decode[0].commands if kind == "fetch"]  # its lease's id too
        assert {message.lease_id for kind, message in c.prefill[0].commands if kind == "renew_lease"} == {handle}
        c.decode[0].state = "serving"
        release(c, "fetch")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_a_gateway_whose_client_has_gone_on_elsewhere_does_not_try_again(cluster):
    async with cluster(num_decode=2) as c:
        for worker in c.decode:
            worker.failures["decode"] = [(10, "ATTACHED")]
        said = await expect_refusal(start(c))
        assert said.code == grpc.StatusCode.ABORTED and said.reason == "ATTACHED"
        assert sum("admit" in worker.kinds() for worker in c.decode) == 1
        await c.idle()


async def test_a_draining_gateway_refuses_new_requests_and_ends_running_ones(cluster):
    async with cluster() as c:
        hold(c, "decode")
        running = start(c)
        await wait_for_gate(c, "decode")
        c.gateway.handler.is_draining = True
        said = await expect_refusal(start(c))
        assert said.code == grpc.StatusCode.UNAVAILABLE and said.reason == "DRAINING"
        release(c, "decode")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)


async def test_a_message_to_who_has_just_gone_is_a_cancellation(cluster, caplog):
    """gRPC says so by an error of its own when the write comes before its cancellation; it is no failure of ours."""

    async def write() -> None:
        raise cygrpc.ExecuteBatchError("Failed grpc_call_start_batch")

    async with cluster() as c:
        caplog.clear()
        with pytest.raises(asyncio.CancelledError):
            async with _ErrorMapping(c.gateway.handler.pace_refusal):
                await write()
        assert not caplog.records
