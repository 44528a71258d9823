"""Embeddings through the gateway between FakeWorkers: read by prefill workers alone, admitted, queued and ended like
any other request."""

import asyncio

import pytest

from baton.protocol import KV_FULL
from baton.service.clock import now
from baton.v1 import fleet_pb2
from baton.v1 import inference_pb2 as pb
from gateway.attempts import answer_timeout, suspected_deaths
from gateway.fleet.router import Router
from gateway.link import worker_session
from gateway.link.worker_breaker import BreakerState
from gateway.link.worker_link import LinkState
from gateway.pooling import pooling_pipeline
from gateway.pooling.pooling_request import PoolingRequest
from gateway.request.bottlenecks import seconds_by_bottleneck
from tests.gateway.calls import expect_refusal
from tests.gateway.pooling.embed_calls import IDS, embed, embed_request, expected, vectors
from tests.support.gateway.fake_worker import FakeWorker
from tests.support.pace import patience


async def test_one_vector_each_and_no_decode_worker(cluster):
    async with cluster() as c:
        response = await embed(c, *IDS, request_id="mine")
        assert vectors(response) == [expected(ids) for ids in IDS]
        assert (response.usage.prompt_tokens, response.request_id) == (273, "mine")
        assert not c.decode[0].kinds() and set(c.prefill[0].kinds()) <= {"prefill", "cancel"}
        specs = [message.spec for kind, message in c.prefill[0].commands if kind == "prefill"]
        assert all(spec.pooling.normalize and not spec.pooling.dimensions and not spec.span_hashes for spec in specs)
        recent = c.gateway.recent.listed(fleet_pb2.ListRequestsRequest(), 0).recent[0]
        assert (recent.request_id, recent.outcome, recent.prompt_tokens) == ("mine", "ok", 273)
        await c.idle()


async def test_what_is_asked_of_the_vector_reaches_the_worker(cluster):
    async with cluster() as c:
        fields = dict(pooling=pb.POOLING_MEAN, normalize=False, dimensions=2, priority=0, slo_class="batch")
        response = await embed(c, "a quick brown fox", **fields)
        tokens = (await c.stub.Tokenize(pb.TokenizeRequest(text="a quick brown fox"), timeout=patience(20))).token_ids
        assert vectors(response) == [expected(tokens)[:2]]
        (spec,) = [message.spec for kind, message in c.prefill[0].commands if kind == "prefill"]
        assert (spec.pooling.pooling, spec.pooling.normalize, spec.pooling.dimensions) == (pb.POOLING_MEAN, False, 2)


@pytest.mark.parametrize(
    "field, request_",
    [
        ("inputs", embed_request()),
        ("inputs", embed_request(*[[20]] * 129)),
        ("inputs", embed_request("a" * (1 << 20))),
        ("inputs[0].input", pb.EmbedRequest(inputs=[pb.EmbedInput()])),
        ("inputs[1].text", embed_request("a fox", "")),
        ("inputs[1].token_ids.ids", embed_request([20], list(range(20, 60)) * 40)),
        ("inputs[0].token_ids.ids[0]", embed_request([1 << 30])),
        ("pooling", embed_request([20], pooling=9)),
        ("dimensions", embed_request([20], dimensions=0)),
        ("dimensions", embed_request([20], dimensions=5)),
        ("request_id", embed_request([20], request_id="a b")),
        ("slo_class", embed_request([20], slo_class="none such")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_ones_are_refused_by_name(cluster, field, request_):
    async with cluster() as c:
        error = await expect_refusal(c.stub.Embed(request_, timeout=patience(20)))
        assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", (field,))
        assert len(error.message) < 300 and not c.prefill[0].kinds()


async def test_an_embedding_waits_its_turn_while_workers_are_full(cluster):
    async with cluster(num_prefill=2) as c:
        for worker in c.prefill:
            worker.refusals += ["queue_full", "kv_full"]
        assert vectors(await embed(c, *IDS)) == [expected(ids) for ids in IDS]
        await c.idle()


async def test_a_line_of_them_is_not_read_one_at_a_time(cluster):
    """The first of a line leaves it once a worker has taken its prompt, not when that is read."""
    async with cluster() as c:
        (worker,), (link,), line = c.prefill, c.gateway.registry.prefill, c.pipeline.queues.prefill
        worker.hold("prefill")
        worker.refusals = ["queue_full"] * 3
        call = asyncio.create_task(embed(c, *IDS))
        await c.until(lambda: len(worker.held) == 3 and not line)
        assert line._served_tokens and link.recent_load.utilization(now()) > 0
        worker.release("prefill")
        assert vectors(await call) == [expected(ids) for ids in IDS]
        await c.idle()


async def test_a_worker_that_does_not_say_that_it_has_taken_a_prompt(cluster, monkeypatch):
    """As those did before."""
    monkeypatch.setattr(FakeWorker, "says_granted", False)
    async with cluster() as c:
        c.prefill[0].refusals = ["queue_full"] * 3
        assert vectors(await embed(c, *IDS)) == [expected(ids) for ids in IDS]
        assert not c.pipeline.queues.prefill
        await c.idle()


async def test_one_that_answers_nothing_is_set_aside(cluster):
    """As with Admit: silence is told from reading by the Granted that comes at once."""
    async with cluster(num_prefill=2) as c:
        c.prefill[0].is_silent = True
        silent = c.gateway.registry.prefill[0]
        for _ in range(4):
            calls = [c.stub.Embed(embed_request(ids), timeout=patience(4)) for ids in IDS]
            assert [vectors(each) for each in await asyncio.gather(*calls)] == [[expected(ids)] for ids in IDS]
        assert silent.breaker.state is BreakerState.OPEN
        await c.idle()


async def test_the_only_one_is_waited_for(cluster, monkeypatch):
    monkeypatch.setattr(answer_timeout, "_LEAST_ANSWER_S", 0.05)
    monkeypatch.setattr(answer_timeout, "_MOST_ANSWER_S", 0.05)
    async with cluster() as c:
        (worker,), (link,) = c.prefill, c.gateway.registry.prefill
        worker.hold("accept")
        call = asyncio.create_task(embed(c, IDS[0]))
        await c.until(lambda: link.breaker.state is BreakerState.OPEN)
        worker.release("accept")
        assert vectors(await call) == [expected(IDS[0])] and worker.kinds().count("prefill") == 1
        await c.idle()


async def test_an_older_one_may_be_silent_until_it_is_done(cluster, monkeypatch):
    monkeypatch.setattr(FakeWorker, "says_granted", False)
    monkeypatch.setattr(answer_timeout, "_LEAST_ANSWER_S", 0.05)
    monkeypatch.setattr(answer_timeout, "_MOST_ANSWER_S", 0.05)
    async with cluster(num_prefill=2) as c:
        for worker in c.prefill:
            worker.hold("prefill")
        call = asyncio.create_task(embed(c, IDS[0]))
        await c.until(lambda: any(worker.held for worker in c.prefill))
        await asyncio.sleep(0.3)
        for worker in c.prefill:
            worker.release("prefill")
        assert vectors(await call) == [expected(IDS[0])]
        assert sum(worker.kinds().count("prefill") for worker in c.prefill) == 1
        await c.idle()


@pytest.mark.parametrize("reason, bottleneck", [("queue_full", "prefill queue"), (KV_FULL, "kv pool")])
async def test_what_the_time_in_line_is_told_as(cluster, reason, bottleneck):
    async with cluster() as c:
        c.prefill[0].refusals = [reason] * 10  # asked again after 20 ms each
        await embed(c, IDS[1])
        ((record, _, _),) = c.gateway.recent.last
        assert seconds_by_bottleneck(record.stamps, record.measured)[bottleneck] >= 0.15
        await c.idle()


async def test_one_that_comes_behind_a_line_waits_there_too(cluster):
    async with cluster() as c:
        c.prefill[0].refusals = ["queue_full"] * 1000
        first = asyncio.create_task(embed(c, IDS[0], request_id="first"))
        await c.until(lambda: len(c.pipeline.queues.prefill))
        second = asyncio.create_task(embed(c, IDS[1], request_id="second"))
        await c.until(lambda: len(c.pipeline.queues.prefill) == 2)
        await asyncio.sleep(0.2)
        c.prefill[0].refusals = []
        await asyncio.gather(first, second)
        assert len(c.gateway.recent.last) == 2
        for record, _, _ in c.gateway.recent.last:
            assert seconds_by_bottleneck(record.stamps, record.measured)["prefill queue"] >= 0.15
        await c.idle()


async def test_the_time_of_many_is_that_of_all_their_turns(cluster):
    """Of each of 16 places at once four prompts are read, one behind the other."""
    async with cluster() as c:
        c.prefill[0].read_s = 0.05
        await embed(c, *[IDS[0]] * 64)
        ((record, _, _),) = c.gateway.recent.last
        assert seconds_by_bottleneck(record.stamps, record.measured)["prefill compute"] >= 0.19
        await c.idle()


async def begin_held(c):
    """Return a call and the worker that reads its prompt, as each does no further than it is let."""
    for worker in c.prefill:
        worker.hold("prefill")
    call = asyncio.create_task(embed(c, IDS[1]))
    await c.until(lambda: any(worker.held for worker in c.prefill))
    (reader,) = [worker for worker in c.prefill if worker.held]
    return call, reader


async def test_a_worker_that_is_lost_is_replaced(cluster):
    async with cluster(num_prefill=2) as c:
        call, lost = await begin_held(c)
        for worker in c.prefill:
            worker.release("prefill") if worker is not lost else None
        await lost.stop()
        assert vectors(await call) == [expected(IDS[1])]


async def test_a_prompt_that_workers_die_of_is_not_tried_for_ever(cluster):
    async with cluster() as c:
        c.prefill[0].failures["prefill"] = [(13, "ENGINE_FAILED")] * 9
        error = await expect_refusal(embed(c, IDS[0]))
        assert error.reason == "POISON" and len(c.prefill[0].failures["prefill"]) == 7
        assert (await expect_refusal(embed(c, IDS[0]))).reason == "POISON"
        c.prefill[0].failures.clear()
        assert vectors(await embed(c, IDS[1])) == [expected(IDS[1])]


async def test_a_worker_whose_session_broke_is_not_taken_for_dead(cluster):
    async with cluster(num_prefill=3) as c:
        call, cut = await begin_held(c)
        cut.held.clear()
        cut.hang_up()
        await c.until(lambda: any(worker.held for worker in c.prefill))
        (link,) = [link for link in c.gateway.registry.prefill if link.address == cut.address]
        await c.until(lambda: link.state is LinkState.SERVING)
        (dead,) = [worker for worker in c.prefill if worker.held]
        await dead.stop()
        for worker in c.prefill:
            worker.release("prefill")
        assert vectors(await call) == [expected(IDS[1])]


async def test_sessions_that_break_together_are_no_deaths(cluster, monkeypatch):
    """Neither is back when the second one is judged."""
    monkeypatch.setattr(worker_session, "_FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(suspected_deaths, "_RETURN_S", 20.0)  # however slow this machine is
    async with cluster(num_prefill=3) as c:
        call, cut = await begin_held(c)
        cut.held.clear()
        cut.hang_up()
        await c.until(lambda: any(worker.held for worker in c.prefill))
        (second,) = [worker for worker in c.prefill if worker.held]
        second.held.clear()
        second.hang_up()
        for worker in c.prefill:
            worker.release("prefill")
        assert vectors(await call) == [expected(IDS[1])]


@pytest.mark.parametrize("gate", ["accept", "prefill"])
async def test_an_embedding_whose_client_goes_is_cancelled(cluster, gate):
    async with cluster() as c:
        c.prefill[0].hold(gate)
        call = c.stub.Embed(embed_request(*IDS), timeout=patience(20))
        await c.until(lambda: len(c.prefill[0].kinds()) == 3)
        call.cancel()
        await c.until(lambda: not any(link.legs for link in c.gateway.registry.links))
        c.prefill[0].release(gate)
        await c.idle()
        await c.until(lambda: c.gateway.handler.num_running == 0 and not c.pipeline.admission.key_ids)


async def test_an_embedding_past_its_deadline_is_given_up(cluster):
    async with cluster() as c:
        c.prefill[0].hold("prefill")
        error = await expect_refusal(c.stub.Embed(embed_request(*IDS), timeout=0.3))
        assert error.code.name == "DEADLINE_EXCEEDED"
        c.prefill[0].release("prefill")
        await c.idle()


async def test_few_of_one_call_are_on_workers_at_a_time(cluster):
    async with cluster() as c:
        c.prefill[0].hold("prefill")
        call = asyncio.create_task(embed(c, *[[20 + index] for index in range(40)]))
        await c.until(lambda: len(c.prefill[0].held) == 16)
        await asyncio.sleep(0.05)
        assert len(c.prefill[0].held) == 16
        c.prefill[0].release("prefill")
        assert vectors(await call) == [expected([20 + index]) for index in range(40)]


async def test_a_tenant_pays_for_them(cluster, tmp_path):
    quotas = tmp_path / "quotas.toml"
    quotas.write_text("[default]\nconcurrent_requests = 2\ntokens_per_s = 1\nburst_tokens = 250\n")
    async with cluster(quotas=quotas) as c:
        c.prefill[0].hold("prefill")
        call = asyncio.create_task(embed(c, *IDS))
        await c.until(lambda: c.prefill[0].held)
        await asyncio.sleep(0.05)
        assert len(c.prefill[0].held) == 2  # as many as the tenant may have running
        c.prefill[0].release("prefill")
        await call
        assert (await expect_refusal(embed(c, IDS[0]))).reason == "TENANT_TOKENS"


@pytest.mark.parametrize("gate, num_charged", [("accept", 0), ("prefill", 73)])
async def test_who_leaves_pays_for_what_workers_have_accepted(cluster, tmp_path, monkeypatch, gate, num_charged):
    made, quotas = [], tmp_path / "quotas.toml"
    monkeypatch.setattr(
        pooling_pipeline, "PoolingRequest", lambda *given: made.append(PoolingRequest(*given)) or made[-1]
    )
    quotas.write_text("[default]\ntokens_per_s = 0.001\nburst_tokens = 1000\n")
    async with cluster(quotas=quotas) as c:
        c.prefill[0].hold(gate)
        call = asyncio.create_task(embed(c, *IDS[:2]))
        await c.until(lambda: len(c.prefill[0].kinds()) == 2)
        await c.until(lambda: gate == "accept" or all(each.num_accepted_tokens for each in made))
        call.cancel()
        await c.until(lambda: not c.pipeline.admission.key_ids)
        assert 1000 - round(c.gateway._quotas._buckets["default"].balance(now())) == num_charged
        c.prefill[0].release(gate)


async def test_a_prompt_whose_worker_tells_of_the_deadline_first_is_paid_too(cluster, tmp_path):
    quotas = tmp_path / "quotas.toml"
    quotas.write_text("[default]\ntokens_per_s = 0.001\nburst_tokens = 1000\n")
    async with cluster(quotas=quotas) as c:
        c.prefill[0].failures["prefill"] = [(4, "DEADLINE_EXCEEDED")]
        assert (await expect_refusal(embed(c, IDS[0]))).code.name == "DEADLINE_EXCEEDED"
        await c.until(lambda: not c.pipeline.admission.key_ids)
        assert 1000 - round(c.gateway._quotas._buckets["default"].balance(now())) == len(IDS[0])


async def test_without_a_prefill_worker_there_are_none(cluster):
    async with cluster(num_prefill=0) as c:
        error = await expect_refusal(embed(c, IDS[0]))
        assert (error.code.name, error.reason) == ("UNAVAILABLE", "NO_WORKER") and "no prefill worker" in error.message


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_no_worker_comes(cluster, monkeypatch, num_prompts):
    """They wait for one that may be starting, and look for it seldom; then they are told that there is none."""
    async with cluster(max_queue_wait_s=0.1, max_start_wait_s=0.6) as c:
        (worker,) = c.prefill
        await worker.stop()
        c.workers.remove(worker)
        await c.until(lambda: not c.gateway.registry.prefill[0].is_serving)
        looks, look = [], Router.pooling_worker_for
        monkeypatch.setattr(Router, "pooling_worker_for", lambda *given: looks.append(1) or look(*given))
        error = await expect_refusal(embed(c, *IDS[:num_prompts]))
        assert (error.code.name, error.reason) == ("UNAVAILABLE", "NO_WORKER") and error.retry_after_s
        assert 1 <= len(looks) < 50 * num_prompts
        await c.idle()


async def test_the_only_worker_comes_back(cluster):
    async with cluster(max_queue_wait_s=0.1) as c:
        (worker,) = c.prefill
        await worker.stop()
        await c.until(lambda: not c.gateway.registry.prefill[0].is_serving)
        calls = [asyncio.create_task(embed(c, ids)) for ids in IDS]
        await asyncio.sleep(0.5)
        assert not any(call.done() for call in calls)
        worker.hello.epoch = worker.epoch = 7
        await worker.start(worker.port)
        assert [vectors(await call) for call in calls] == [[expected(ids)] for ids in IDS]
        await c.idle()


async def test_one_that_waits_for_its_worker_holds_up_no_other(cluster):
    """Only the worker that is away can read it; the other one is idle."""
    async with cluster((1024, 256), 1) as c:
        long, link, ids = c.prefill[0], c.gateway.registry.prefill[0], list(range(20, 320))
        await long.stop()
        await c.until(lambda: not link.is_serving)
        waiting = asyncio.create_task(embed(c, ids))
        await c.until(lambda: len(c.pipeline.queues) == 1)
        assert vectors(await embed(c, IDS[0])) == [expected(IDS[0])]
        assert not waiting.done() and len(c.pipeline.queues) == 1
        long.hello.epoch = long.epoch = 7
        await long.start(long.port)
        assert vectors(await waiting) == [expected(ids)]
        await c.idle()


async def test_full_for_too_long(cluster):
    async with cluster(max_queue_wait_s=0.2) as c:
        c.prefill[0].refusals = ["queue_full"] * 1000
        error = await expect_refusal(embed(c, IDS[0]))
        assert (error.code.name, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_WAIT") and error.retry_after_s
        await c.idle()


async def test_a_request_id_in_use(cluster):
    async with cluster() as c:
        c.prefill[0].hold("prefill")
        first = asyncio.create_task(embed(c, IDS[0], request_id="same"))
        await c.until(lambda: c.prefill[0].held)
        assert (await expect_refusal(embed(c, IDS[1], request_id="same"))).reason == "REQUEST_ID_IN_USE"
        c.prefill[0].release("prefill")
        await first
