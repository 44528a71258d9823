"""Sessions that break while answers are written, clients that resume one: no token lost, repeated or changed."""

import asyncio
import math
import time

import grpc
import pytest

from baton.service.clock import now
from baton.service.errors import Cancelled, DeadlineExceeded
from baton.service.net.server import Health
from baton.v1 import inference_pb2 as pb
from gateway.attempts import failure_limits, kv_fetch, suspected_deaths
from gateway.link import worker_session
from gateway.link.mailbox import Lost
from gateway.link.worker_link import LinkState
from gateway.prefix.memory_index import MemoryIndex
from gateway.request.validation import validate
from tests.gateway.calls import (
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

RESUMED = {"request_id": "again", "seed": 1}


async def rest_of(call) -> list[pb.GenerateResponse]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


@pytest.mark.parametrize("n", [1, 2])
async def test_a_broken_session_is_attached_to(cluster, n):
    async with cluster(num_decode=2) as c:
        hold(c, "decode")
        running = start(c, n=n)
        await wait_for_gate(c, "decode")
        (worker,) = (worker for worker in c.decode if worker.held)
        worker.hang_up()
        await c.until(lambda: "attach" in worker.kinds())
        release(c, "decode")
        messages = await running
        for index in range(n):
            assert ids_of(messages, index) == tokens_of(PROMPT, 6, 400, index)
        assert worker.kinds().count("admit") == 1 and not worker.parked
        (admitted,) = [message.key.attempt for kind, message in worker.commands if kind == "admit"]
        asked = [message for kind, message in worker.commands if kind == "attach"]
        assert {message.previous_attempt for message in asked} == {admitted}, "no sequence of an older attempt"
        assert "attach" not in next(each for each in c.decode if each is not worker).kinds()
        await c.idle()


async def test_what_its_class_was_promised_holds_for_what_is_attached_to(cluster):
    async with cluster() as c:
        hold(c, "decode")
        request, (link,) = make_request(PROMPT, max_tokens=6), c.gateway.registry.decode
        request.slo_class = "interactive"
        running = asyncio.create_task(read(c.stub.Generate(request, timeout=patience(20))))
        await wait_for_gate(c, "decode")
        assert link.slo_tpots_s == {0.05: 1}
        c.decode[0].hang_up()
        await c.until(lambda: any(each.request.record.num_attached for each in c.pipeline.running.values()))
        assert link.slo_tpots_s == {0.05: 1}
        release(c, "decode")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_who_has_just_read_the_prompt_is_known_to_hold_it(cluster, monkeypatch):
    """Before its event has come to the index: a request that moves now need not read it anew."""
    monkeypatch.setattr(MemoryIndex, "apply", lambda *_: None)
    async with cluster(num_prefill=2) as c:
        running, _ = await held_in_decode(c)
        (machine,) = c.pipeline.running.values()
        reader = holder(c, "prefill").address
        matched = {link.address: machine.request.router.num_matched_tokens(link) for link in c.gateway.registry.prefill}
        assert matched == {worker.address: 256 * (worker.address == reader) for worker in c.prefill}
        release(c, "decode")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_a_worker_that_knows_nothing_any_more(cluster):
    """A session breaks and what it carried is gone: another attempt, and the same answer."""
    async with cluster() as c:
        hold(c, "decode")
        running = start(c)
        await wait_for_gate(c, "decode")
        c.decode[0].hold("attach")
        c.decode[0].hang_up()
        await c.until(lambda: "attach" in c.decode[0].kinds())
        c.decode[0].parked.clear()
        c.decode[0].release("attach")
        release(c, "decode")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        assert c.decode[0].kinds().count("admit") == 2
        await c.idle()


async def test_a_worker_that_has_cached_a_part_of_the_answer(cluster):
    """It has little to read, and not less than nothing: that would stay there as a prompt that waits."""
    async with cluster(num_prefill=0) as c:
        (worker,) = c.decode
        running = start(c, max_tokens=400)
        await c.until(lambda: any(each.request.record.num_output_tokens > 20 for each in c.pipeline.running.values()))
        for gate in ("decode", "attach"):
            worker.hold(gate)
        worker.hang_up()
        await c.until(lambda: "attach" in worker.kinds())
        worker.parked.clear()
        worker.num_cached_tokens = lambda spec: len(spec.token_ids) - 1
        for gate in ("decode", "attach"):
            worker.release(gate)
        assert ids_of(await running) == tokens_of(PROMPT, 400, 400)
        assert worker.kinds().count("admit") == 2
        await c.idle()


async def test_a_sequence_that_is_attached_to_has_all_its_kv(cluster, monkeypatch):
    """Both sessions break before Fetched has come: it is not started over for a fetch that nobody hears of any more."""
    monkeypatch.setattr(kv_fetch, "_DOUBT_S", 0.1)
    async with cluster() as c:
        hold(c, "decode")
        running = start(c)
        await wait_for_gate(c, "decode")  # Fetched and Done come by two sessions, in either order
        await c.until(lambda: any(each.request.attempt.kv_fetch.is_done for each in c.pipeline.running.values()))
        (machine,) = c.pipeline.running.values()
        request = machine.request
        request.attempt.kv_fetch.is_done = False
        request.mailbox.post(request.attempt.prefill, Lost("no word from it"))
        c.decode[0].hang_up()
        await c.until(lambda: request.record.num_attached)
        await asyncio.sleep(0.3)
        assert request.attempt.kv_fetch.due == math.inf
        release(c, "decode")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        assert request.record.num_attempts == 1 and c.decode[0].kinds().count("admit") == 1
        await c.idle()


@pytest.mark.parametrize("received", [0, 1, 3, 5, 6])
@pytest.mark.parametrize("is_parked", [True, False])
async def test_a_client_resumes(cluster, received, is_parked):
    async with cluster(num_decode=2) as c:
        expected = tokens_of(PROMPT, 6, 400)
        if is_parked:
            c.park("again", PROMPT, max_tokens=6, seed=1)
        messages = await generate(c, max_tokens=6, resume_from=[received], **RESUMED)
        assert ids_of(messages) == expected[received:]
        last = messages[-1]
        assert last.finish_reason == pb.FINISH_REASON_LENGTH and last.usage.output_tokens == 6
        assert last.usage.prompt_tokens == len(PROMPT) and messages[0].seed == 1
        assert any("admit" in worker.kinds() for worker in c.decode) is not is_parked
        for worker in c.decode:
            worker.parked.clear()
        await c.idle()


async def test_text_and_stop_strings_go_over_the_seam(cluster):
    async with cluster(num_decode=2) as c:
        whole = await generate(c, max_tokens=40, **RESUMED)
        text = "".join(message.text for message in whole)
        stop = text[len(text) // 2 : len(text) // 2 + 6]
        stopped = await generate(c, max_tokens=40, stop=[stop], **RESUMED)
        num_tokens = len(ids_of(stopped))
        assert stopped[-1].matched_stop == stop and 1 < num_tokens <= 40
        for index in range(len(stopped)):  # a client has whole messages
            received = len(ids_of(stopped[:index]))
            messages = await generate(c, max_tokens=40, stop=[stop], resume_from=[received], **RESUMED)
            assert ids_of(messages) == ids_of(stopped)[received:]
            assert "".join(message.text for message in messages) == "".join(each.text for each in stopped[index:])
            assert messages[-1].matched_stop == stop
        await c.idle()


async def test_choices_resume_each_from_its_own(cluster):
    async with cluster(num_decode=2) as c:
        messages = await generate(c, max_tokens=6, n=2, resume_from=[2, 4], **RESUMED)
        assert ids_of(messages, 0) == tokens_of(PROMPT, 6, 400, 0)[2:]
        assert ids_of(messages, 1) == tokens_of(PROMPT, 6, 400, 1)[4:]
        assert messages[-1].usage.output_tokens == 12


@pytest.mark.parametrize("fields, field, says", [
    ({"resume_from": [1], "seed": 1}, "resume_from", "request_id"),
    ({"resume_from": [1], "request_id": "again", "temperature": 1.0}, "resume_from", "seed"),
    ({"resume_from": [1, 2], **RESUMED}, "resume_from", "one each"),
    ({"resume_from": [7], **RESUMED}, "resume_from[0]", "max_tokens"),
    ({"resume_from": [6], "stop_token_ids": [tokens_of(PROMPT, 6, 400)[1]], **RESUMED}, "resume_from[0]", "after 2"),
])  # fmt: skip
async def test_what_cannot_be_resumed(cluster, fields, field, says):
    async with cluster() as c:
        said = await expect_refusal(generate(c, max_tokens=6, **fields))
        assert said.code == grpc.StatusCode.INVALID_ARGUMENT and said.fields == (field,) and says in said.message
        await c.idle()


async def test_a_client_comes_back_before_its_stream_is_known_to_be_dead(cluster):
    async with cluster() as c:
        hold(c, "decode")
        lost = c.stub.Generate(make_request(PROMPT, max_tokens=6, **RESUMED), timeout=patience(20))
        first = await lost.read()
        again = asyncio.create_task(generate(c, max_tokens=6, resume_from=[len(first.token_ids)], **RESUMED))
        assert (await expect_refusal(rest_of(lost))).code == grpc.StatusCode.CANCELLED
        release(c, "decode")
        assert ids_of([first]) + ids_of(await again) == tokens_of(PROMPT, 6, 400)
        await c.idle()


@pytest.mark.parametrize("unread", [3, 6])
async def test_a_client_comes_back_whose_stream_is_not_read(cluster, unread):
    """Its host has another network, say: the gateway waits in a write, of a token amid the answer or of the last."""
    async with cluster() as c:
        model, messages = c.fleet.model, []

        async def emit(message) -> None:
            messages.append(message)
            if len(ids_of(messages)) >= unread:
                await asyncio.Event().wait()

        validated = validate(make_request(PROMPT, max_tokens=6, **RESUMED), model)
        unread_stream = asyncio.create_task(c.pipeline.serve(validated, model, now() + patience(60), record(), emit))
        await c.until(lambda: len(ids_of(messages)) >= unread)
        again = await generate(c, max_tokens=6, resume_from=[2], **RESUMED)
        assert ids_of(again) == tokens_of(PROMPT, 6, 400)[2:]
        with pytest.raises(Cancelled):
            await unread_stream
        await c.idle()


async def test_a_write_that_times_out_is_no_client_that_comes_back(cluster):
    async with cluster() as c:

        async def emit(message) -> None:
            raise TimeoutError

        validated = validate(make_request(PROMPT, max_tokens=6), c.fleet.model)
        with pytest.raises(DeadlineExceeded):
            await c.pipeline.serve(validated, c.fleet.model, now() + patience(60), record(), emit)
        await c.idle()


async def test_greedy_needs_no_seed(cluster):
    async with cluster() as c:
        messages = await generate(c, max_tokens=6, request_id="again", temperature=0.0, resume_from=[2])
        assert ids_of(messages) == tokens_of(PROMPT, 6, 400)[2:]


async def test_a_request_that_lost_the_only_worker_waits_for_it_a_moment(cluster):
    async with cluster() as c:
        hold(c, "decode")
        running = [start(c) for _ in range(3)]
        await c.until(lambda: len(c.decode[0].held) == 3)
        await c.decode[0].stop()
        await c.until(lambda: not c.gateway.registry.decode[0].is_serving)
        c.decode[0].held.clear()
        c.decode[0].parked.clear()
        c.decode[0].epoch = c.decode[0].hello.epoch = 7
        release(c, "decode")
        await c.decode[0].start(c.decode[0].port)
        for messages in await asyncio.gather(*running):
            assert ids_of(messages) == tokens_of(PROMPT, 6, 400)
        assert not c.pipeline.queues.credit
        await c.idle()


async def test_a_silent_worker_is_left(cluster, monkeypatch):
    """It hangs: nothing comes from it, and its connection stays."""
    async with cluster(num_decode=2) as c:
        hold(c, "decode")
        running = start(c)
        await wait_for_gate(c, "decode")
        (worker,) = (worker for worker in c.decode if worker.held)
        for session in worker._sessions:
            session.tasks["load",].cancel()
        worker.hold("attach")
        release(c, "decode")
        worker.hold("decode")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        worker.release("attach")
        worker.release("decode")
        worker.parked.clear()
        await c.idle()


async def test_a_gateway_that_stood_still_blames_nobody(cluster):
    async with cluster(num_decode=2) as c:
        before = [link.hello for link in c.gateway.registry.links]
        for link in c.gateway.registry.links:
            link._heard_at, link._was_heard = -1e9, True
        time.sleep(4.0)  # the whole process, as a frozen one
        await asyncio.sleep(0.6)
        assert [link.hello for link in c.gateway.registry.links] == before
        assert all(link.state is LinkState.SERVING for link in c.gateway.registry.links)


async def held_in_decode(c):
    """A request whose answer waits on a decode worker, and that worker."""
    hold(c, "decode")
    running = start(c)
    await wait_for_gate(c, "decode")
    (worker,) = (worker for worker in c.decode if worker.held)
    return running, worker


async def test_a_stalled_worker_is_left_where_another_serves(cluster):
    async with cluster(num_decode=2) as c:
        running, worker = await held_in_decode(c)
        worker.state = "stalled"
        await c.until(lambda: any(each.held for each in c.decode if each is not worker))
        release(c, "decode")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_a_stalled_worker_alone_may_come_back(cluster):
    async with cluster() as c:
        running, worker = await held_in_decode(c)
        worker.state = "stalled"
        await c.until(lambda: c.gateway.registry.decode[0].state is LinkState.STALLED)
        worker.state = "serving"
        release(c, "decode")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        assert worker.kinds().count("admit") == 1


async def test_a_stalled_worker_is_left_where_another_comes_to_serve(cluster):
    async with cluster(num_decode=2) as c:
        running, worker = await held_in_decode(c)
        (other,) = (each for each in c.decode if each is not worker)
        for each in (other, worker):
            each.state = "stalled"
            await c.until(lambda: any(link.state is LinkState.STALLED for link in c.gateway.registry.decode))
        await c.until(lambda: all(link.state is LinkState.STALLED for link in c.gateway.registry.decode))
        other.state = "serving"
        await c.until(lambda: other.held)
        release(c, "decode")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_a_prompt_leaves_a_stalled_worker_for_one_that_decodes(cluster):
    async with cluster() as c:
        hold(c, "prefill")
        running = start(c)
        await c.until(lambda: "fetch" in c.decode[0].kinds())
        c.fleet.router._split = "auto"
        c.prefill[0].state = "stalled"
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        release(c, "prefill")
        await c.idle()


async def test_a_fetch_from_a_stalled_worker_is_given_up_once_it_has_had_its_moment(cluster):
    """However often the worker says that it is stalled."""
    async with cluster(num_prefill=2) as c:
        hold(c, "fetch")
        running = start(c)
        await wait_for_gate(c, "decode")
        (link,) = (link for link in c.gateway.registry.prefill if link.legs)
        (worker,) = (each for each in c.prefill if each.address == link.address)
        worker.state = "stalled"
        await c.until(lambda: sum(each.kinds().count("prefill") for each in c.prefill) == 2)
        release(c, "fetch")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_a_gateway_that_goes_says_how_to_go_on(cluster):
    async with cluster(drain_grace_s=0.2) as c:
        hold(c, "decode")
        call = c.stub.Generate(make_request(PROMPT, max_tokens=6, request_id="long"), timeout=patience(20))
        first = await call.read()
        assert first.seed and first.request_id == "long"
        draining = asyncio.create_task(c.gateway._drain(Health(_NoServer())))
        said = await expect_refusal(rest_of(call))
        assert said.code == grpc.StatusCode.UNAVAILABLE and said.reason == "DRAINING" and "resume_from" in said.message
        await draining
        await c.until(lambda: "long" in c.decode[0].parked)
        assert "cancel" not in c.decode[0].kinds()


class _NoServer:
    def add_generic_rpc_handlers(self, handlers) -> None: ...

    def add_registered_method_handlers(self, *args) -> None: ...


async def test_poison_is_kept_away_for_a_while(cluster, monkeypatch):
    async with cluster(num_prefill=4) as c:
        hold(c, "prefill")
        running = start(c)
        while not running.done():
            for dead in [worker for worker in c.prefill if worker.held]:
                dead.held.clear()
                await dead.stop()
            await asyncio.sleep(0.01)
        assert (await expect_refusal(running)).reason == "POISON"
        release(c, "prefill")
        num_commands = [len(worker.kinds()) for worker in c.workers]
        said = await expect_refusal(generate(c, max_tokens=6))
        assert said.code == grpc.StatusCode.ABORTED and said.reason == "POISON"
        assert [len(worker.kinds()) for worker in c.workers] == num_commands
        assert ids_of(await generate(c, PROMPT[1:], max_tokens=4)) == tokens_of(PROMPT[1:], 4, 400)


async def test_who_has_only_lost_its_session_has_not_died(cluster):
    """Seen: a session that was reset and a worker that was killed, within 0.1 s, were two deaths of one innocent
    prompt."""
    async with cluster(0, 3) as c:
        hold(c, "admit")
        running = start(c)
        await c.until(lambda: any(worker.kinds() for worker in c.decode))
        cut = holder(c, "decode")
        others = [worker for worker in c.decode if worker is not cut]
        for worker in others:
            worker.hold("prefill")
        release(c, "admit")
        cut.hang_up()
        await c.until(lambda: any("prefill" in worker.kinds() for worker in others))
        (link,) = [link for link in c.gateway.registry.decode if link.address == cut.address]
        await c.until(lambda: link.state is LinkState.SERVING)
        await next(worker for worker in others if "prefill" in worker.kinds()).stop()
        release(c, "prefill")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)


async def test_stalls_that_pass_are_no_deaths(cluster, monkeypatch):
    """Workers of one host stand still for a moment, one after the other, while a prompt is read; all of them live."""
    monkeypatch.setattr(suspected_deaths, "_RETURN_S", 20.0)  # however slow this machine is
    async with cluster(num_prefill=3) as c:
        hold(c, "prefill")
        running, read_by = start(c), []
        for number in range(2):
            await c.until(lambda number=number: sum(bool(worker.kinds()) for worker in c.prefill) == number + 1)
            (stalled,) = [worker for worker in c.prefill if worker.kinds() and worker not in read_by]
            read_by.append(stalled)
            (link,) = [link for link in c.gateway.registry.prefill if link.address == stalled.address]
            stalled.state = "stalled"
            await c.until(lambda: link.state is LinkState.STALLED)
            stalled.state = "serving"
            await c.until(lambda: link.is_serving)
        release(c, "prefill")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        assert ids_of(await generate(c, max_tokens=6)) == tokens_of(PROMPT, 6, 400), "the prompt is not to blame"


async def test_sessions_that_break_together_are_no_deaths(cluster, monkeypatch):
    """Neither is back when the second one is judged."""
    monkeypatch.setattr(worker_session, "_FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(suspected_deaths, "_RETURN_S", 20.0)  # however slow this machine is
    async with cluster(num_prefill=3) as c:
        hold(c, "prefill")
        running = start(c)
        for _ in range(2):
            await c.until(lambda: any(worker.held for worker in c.prefill))
            (cut,) = [worker for worker in c.prefill if worker.held]
            cut.held.clear()
            cut.hang_up()
        await asyncio.sleep(0.1)
        release(c, "prefill")
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_a_failure_is_no_storm(cluster):
    """A request that fails everywhere is retried as often as the budget allows, and no more."""
    async with cluster(num_prefill=2) as c:
        c.pipeline.retry_throttle._num_left = 3.0
        c.decode[0].failures["fetch"] = [(14, "KV_TRANSFER_FAILED")] * 1000
        said = [await expect_refusal(generate(c, PROMPT[i:], max_tokens=6)) for i in range(4)]
        assert {each.code for each in said} == {grpc.StatusCode.UNAVAILABLE}
        assert said[-1].reason == "RETRY_BUDGET" and said[-1].retry_after_s
        assert c.decode[0].kinds().count("admit") <= 4 + 3 + 1, "the first time that KV does not come is free"
        await c.idle()


async def test_every_step_counts_as_progress(cluster):
    """A long answer may lose more workers than a request that gets nowhere."""
    async with cluster() as c:
        worker, num_lost = c.decode[0], failure_limits.MAX_BARREN + 3
        worker.hold("end")
        call = c.stub.Generate(make_request(PROMPT, max_tokens=200), timeout=patience(30))
        await c.until(lambda: c.pipeline.running)
        (machine,) = c.pipeline.running.values()
        for lost in range(1, num_lost + 1):
            await c.until(lambda: machine.request.attempt.has_stepped)
            worker.hold("decode")
            worker.hold("attach")
            await asyncio.sleep(0.1)  # a session that lives for a moment is no worker that dies of each
            worker.hang_up()
            await c.until(lambda lost=lost: worker.kinds().count("attach") == lost)
            worker.parked.clear()
            worker.release("attach")
            await c.until(lambda lost=lost: worker.kinds().count("admit") == 1 + lost)
            worker.release("decode")
        worker.release("end")
        assert ids_of(await rest_of(call)) == tokens_of(PROMPT, 200, 400)
        await c.idle()
