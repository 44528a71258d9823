"""Lines of requests in a whole gateway: while every worker is full, or none serves."""

import asyncio
from collections import Counter, defaultdict

import grpc
import pytest

from baton.v1 import worker_pb2 as pb
from gateway.routing.latency_model import RecentLoad
from tests.gateway.calls import PROMPT, expect_refusal, generate, hold, ids_of, release, start, wait_for_gate
from tests.support.client import make_request
from tests.support.gateway.fake_worker import FakeWorker, tokens_of
from tests.support.gateway.registration import register
from tests.support.pace import patience


async def test_a_full_decode_worker_is_passed_over(cluster):
    async with cluster(num_decode=2) as c:
        for worker in c.decode[:1]:
            worker.refusals = ["kv_full"] * 3
        assert ids_of(await start(c)) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_all_full_for_a_while(cluster):
    """Requests wait in line, and are served in order when there is room."""
    async with cluster(num_decode=2) as c:
        for worker in c.decode:
            worker.refusals = ["kv_full"] * 4
        answers = await asyncio.gather(*(start(c) for _ in range(6)))
        assert [ids_of(messages) for messages in answers] == [tokens_of(PROMPT, 6, 400)] * 6
        assert not c.pipeline.queues.credit
        await c.idle()


async def test_full_prefill_workers(cluster):
    async with cluster(num_prefill=2) as c:
        for worker in c.prefill:
            worker.refusals = ["queue_full"] * 3
        answers = await asyncio.gather(*(start(c) for _ in range(4)))
        assert [ids_of(messages) for messages in answers] == [tokens_of(PROMPT, 6, 400)] * 4
        assert not c.pipeline.queues.prefill
        await c.idle()


async def test_full_for_too_long(cluster):
    async with cluster(max_queue_wait_s=0.2) as c:
        c.decode[0].refusals = ["kv_full"] * 1000
        for said in await asyncio.gather(*(expect_refusal(start(c)) for _ in range(2))):
            assert said.code == grpc.StatusCode.RESOURCE_EXHAUSTED and said.reason == "QUEUE_WAIT"
            assert said.message == "it waited in line for a worker with room for 0.2 s" and said.retry_after_s
        assert not c.pipeline.queues.credit
        await c.idle()


async def test_a_full_line(cluster):
    async with cluster(max_queued_requests=1) as c:
        c.decode[0].refusals = ["kv_full"] * 10_000
        waiting = start(c, request_id="first")
        await c.until(lambda: len(c.pipeline.queues.credit))
        said = await expect_refusal(start(c))
        assert said.code == grpc.StatusCode.RESOURCE_EXHAUSTED and said.reason == "QUEUE_FULL" and said.retry_after_s
        c.decode[0].refusals = []
        assert ids_of(await waiting) == tokens_of(PROMPT, 6, 400)


async def test_one_that_ran_waits_for_its_lost_worker_however_many_do(cluster):
    async with cluster(max_queued_requests=0) as c:
        worker, link = c.decode[0], c.gateway.registry.decode[0]
        hold(c, "decode")
        running = start(c)
        await wait_for_gate(c, "decode")
        await worker.stop()
        await c.until(lambda: not link.is_serving and len(c.pipeline.queues.decode_start) == 1)
        assert (await expect_refusal(start(c))).reason == "QUEUE_FULL"
        release(c, "decode")
        worker.held.clear()
        worker.hello.epoch = worker.epoch = 7
        await worker.start(worker.port)
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_too_many_requests(cluster):
    async with cluster(max_concurrent_requests=2) as c:
        hold(c, "prefill")
        running = [start(c), start(c)]
        await c.until(lambda: c.gateway.handler.num_running == 2)
        said = await expect_refusal(start(c))
        assert said.reason == "TOO_MANY_REQUESTS" and said.retry_after_s
        release(c, "prefill")
        for messages in await asyncio.gather(*running):
            assert ids_of(messages) == tokens_of(PROMPT, 6, 400)


@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize("wait_s", [0, 0.5])
async def test_a_request_without_a_worker_is_refused_after_its_wait(cluster, num_prefill, wait_s):
    async with cluster(num_prefill, max_start_wait_s=wait_s) as c:
        await c.decode[0].stop()
        await c.until(lambda: not c.gateway.registry.decode[0].is_serving)
        said = await expect_refusal(start(c))
        assert said.code == grpc.StatusCode.UNAVAILABLE and said.reason == "NO_WORKER" and said.retry_after_s
        c.workers.remove(c.decode[0])
        await c.idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_no_worker_comes_for_longer_than_a_queue_s_wait(cluster, role):
    """It is not told that none had room: none was there."""
    async with cluster(max_queue_wait_s=0.2, max_start_wait_s=0.6) as c:
        (worker,) = getattr(c, role)
        await worker.stop()
        await c.until(lambda: not any(link.is_serving for link in getattr(c.gateway.registry, role)))
        said = await expect_refusal(start(c))
        assert said.code == grpc.StatusCode.UNAVAILABLE and said.reason == "NO_WORKER" and said.retry_after_s
        c.workers.remove(worker)
        await c.idle()


@pytest.mark.parametrize("waits", ["for its turn", "for credit"])
async def test_the_only_prefill_worker_goes_while_a_request_waits_for_it(cluster, waits):
    """No leg of the request is on it, whose end would tell."""
    async with cluster() as c:
        (worker,), (link,), queues = c.prefill, c.gateway.registry.prefill, c.pipeline.queues
        if waits == "for credit":
            hold(c, "admit")
        else:
            worker.refusals = ["kv_full"] * 1000
        running = start(c)
        await c.until(lambda: "admit" in c.decode[0].kinds() and (waits == "for credit" or len(queues.prefill)))
        await worker.stop()
        await c.until(lambda: not link.is_serving)
        release(c, "admit")
        await c.until(lambda: len(queues.decode_start))
        await c.until(lambda: not c.decode[0].held)
        worker.refusals = []
        worker.hello.epoch = worker.epoch = 7
        await worker.start(worker.port)
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        assert not queues
        await c.idle()


async def test_a_request_that_loses_its_decode_worker_in_line_is_not_served(cluster):
    """Its prompt counts for neither the line's speed nor its tenant's turns."""
    async with cluster(num_decode=2) as c:
        c.prefill[0].refusals = ["queue_full"] * 100_000
        running, line = start(c), c.pipeline.queues.prefill
        await c.until(lambda: len(line))
        dead = next(worker for worker in c.decode if worker.held)
        await dead.stop()
        c.workers.remove(dead)
        (machine,) = c.pipeline.running.values()
        await c.until(lambda: machine.request.record.num_attempts == 2 and len(line))
        assert not line._served_tokens
        c.prefill[0].refusals = []
        assert ids_of(await running) == tokens_of(PROMPT, 6, 400)
        assert line._served_tokens
        await c.idle()


async def test_a_client_that_does_not_read_holds_up_nobody_in_line(cluster):
    async with cluster() as c:
        worker, link, line = c.decode[0], c.gateway.registry.decode[0], c.pipeline.queues.decode_start
        hold(c, "decode")
        first = start(c)
        await wait_for_gate(c, "decode")
        (machine,) = c.pipeline.running.values()
        await worker.stop()
        await c.until(lambda: not link.is_serving and len(line) == 1)
        second = start(c)
        await c.until(lambda: len(line) == 2)
        answer, reads = machine.request.answer, asyncio.Event()
        emit = answer._emit

        async def emit_slowly(message) -> None:
            await reads.wait()
            await emit(message)

        answer._emit = emit_slowly
        answer.push(0, 1, tokens_of(PROMPT, 2, 400)[1:], (), 0)  # as its last, beside the news of its end
        machine.request.post_capacity()
        await c.until(lambda: not answer.choices[0].has_pending)
        release(c, "decode")
        worker.held.clear()
        worker.hello.epoch = worker.epoch = 7
        await worker.start(worker.port)
        async with asyncio.timeout(patience(5)):
            assert ids_of(await second) == tokens_of(PROMPT, 6, 400)
        assert not first.done()
        reads.set()
        assert ids_of(await first) == tokens_of(PROMPT, 6, 400)
        await c.idle()


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_who_refuses_has_no_more_work(cluster, monkeypatch, num_prefill):
    """It is asked many times, and would pass for busy beside a worker that joins."""
    given = defaultdict[RecentLoad, float](float)
    monkeypatch.setattr(RecentLoad, "add", lambda recent, seconds, at: given.update({recent: given[recent] + seconds}))
    async with cluster(num_prefill) as c:
        for worker in c.workers:
            worker.refusals = ["kv_full"] * 5
        assert ids_of(await start(c)) == tokens_of(PROMPT, 6, 400)
        ((record, _, _),) = c.gateway.recent.last
        reader, writer = (c.gateway.registry.prefill or c.gateway.registry.decode)[0], c.gateway.registry.decode[0]
        expected = Counter({reader.recent_load: record.decision.prefill_s}) + Counter(
            {writer.recent_load: record.decision.decode_s}
        )
        assert given == pytest.approx(expected)


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_requests_wait_for_the_only_worker_of_a_role(cluster, num_prefill):
    """One that runs goes on, those that come meanwhile are answered, for longer than a queue's wait."""
    async with cluster(num_prefill, max_queue_wait_s=0.2) as c:
        worker, link = c.decode[0], c.gateway.registry.decode[0]
        hold(c, "decode")
        call = c.stub.Generate(make_request(PROMPT, max_tokens=6), timeout=patience(20))
        first = await call.read()
        await worker.stop()
        await c.until(lambda: not link.is_serving)
        coming = [start(c) for _ in range(3)]
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in coming)
        release(c, "decode")
        worker.hello.epoch = worker.epoch = 7
        worker.held.clear()  # a new process: it knows nothing of a prompt whose first token came before its Start
        await worker.start(worker.port)
        for messages in await asyncio.gather(*coming):
            assert ids_of(messages) == tokens_of(PROMPT, 6, 400)
        messages = [first]
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert ids_of(messages) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_a_worker_that_comes_back_has_no_room_yet(cluster):
    """Who has waited for its start is not late for a queue's wait, though it is full at first."""
    async with cluster(max_queue_wait_s=0.4) as c:
        worker, link = c.decode[0], c.gateway.registry.decode[0]
        await generate(c, max_tokens=2)
        await worker.stop()
        await c.until(lambda: not link.is_serving)
        coming = start(c)
        await c.until(lambda: len(c.pipeline.queues.decode_start))
        worker.hello.epoch = worker.epoch = 7
        worker.refusals = ["queue_full"] * 30  # asked every 20 ms or so
        await worker.start(worker.port)
        assert ids_of(await coming) == tokens_of(PROMPT, 6, 400)
        assert not worker.refusals
        await c.idle()


async def test_one_that_waits_for_its_worker_holds_up_no_other(cluster):
    """Only the worker that is away could hold it; the other one is idle."""
    async with cluster(0, (1024, 256)) as c:
        long, link, queues = c.decode[0], c.gateway.registry.decode[0], c.pipeline.queues
        await long.stop()
        await c.until(lambda: not link.is_serving)
        waiting = start(c)
        await c.until(lambda: len(queues) == 1)
        assert ids_of(await start(c, prompt=PROMPT[:20])) == tokens_of(PROMPT[:20], 6, 400)
        assert not waiting.done() and len(queues) == 1
        long.hello.epoch = long.epoch = 7
        long.refusals = ["kv_full"] * 3  # then it waits for room there
        await long.start(long.port)
        assert ids_of(await waiting) == tokens_of(PROMPT, 6, 400)
        assert not long.refusals and not queues
        await c.idle()


async def test_one_that_waits_for_its_worker_holds_up_no_other_that_waits(cluster):
    """The worker that comes first could hold all but the first of them; all are one tenant's."""
    async with cluster(0, (1024, 256, 128)) as c:
        (long, short, _), queues = c.decode, c.pipeline.queues
        for worker, link in zip((long, short), c.gateway.registry.decode, strict=False):
            await worker.stop()
            await c.until(lambda link=link: not link.is_serving)
        first = start(c)
        await c.until(lambda: len(queues.decode_start) == 1)
        others = [start(c, prompt=PROMPT[:150]) for _ in range(3)]
        await c.until(lambda: len(queues.decode_start) == 4)
        for worker in (short, long):
            worker.hello.epoch = worker.epoch = 7
        await short.start(short.port)
        for messages in await asyncio.gather(*others):
            assert ids_of(messages) == tokens_of(PROMPT[:150], 6, 400)
        assert not first.done() and len(queues) == 1
        await long.start(long.port)
        assert ids_of(await first) == tokens_of(PROMPT, 6, 400)
        await c.idle()


async def test_an_adapter_is_not_unknown_before_all_workers_have_said_theirs(cluster, digest):
    late = await FakeWorker("decode", digest, 400).start()
    late.hello.adapters.add(name="tabs", identity=b"a" * 32)
    late.hold("hello")
    async with cluster(0, 1) as c:
        c.workers.append(late)
        assert (await expect_refusal(start(c, model="tabs"))).reason == "MODEL_NOT_FOUND"
        await register(c, late.address)
        await c.until(lambda: late.commands)
        said = await expect_refusal(start(c, model="tabs"))
        assert said.code == grpc.StatusCode.UNAVAILABLE and said.reason == "NO_WORKER" and said.retry_after_s
        assert ids_of(await start(c)) == tokens_of(PROMPT, 6, 400)
        late.release("hello")
        await c.until(lambda: all(link.is_serving for link in c.gateway.registry.links))
        assert ids_of(await start(c, model="tabs")) == tokens_of(PROMPT, 6, 400)
        assert (await expect_refusal(start(c, model="spaces"))).reason == "MODEL_NOT_FOUND"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("reason", ["adapter_slots", "adapter_loading"])
async def test_a_request_whose_adapter_has_no_slot_holds_up_no_other(cluster, monkeypatch, role, reason):
    named, make = [pb.Adapter(name="tabs", identity=b"a" * 32)], FakeWorker.__init__
    monkeypatch.setattr(FakeWorker, "__init__", lambda self, *args, **hello: make(self, *args, adapters=named, **hello))
    async with cluster(max_queue_wait_s=patience(20)) as c:
        (worker,) = getattr(c, role)
        worker.refused_adapters[b"a" * 32] = reason
        waiting = start(c, model="tabs")
        await c.until(lambda: len(c.pipeline.queues) == 1)
        answers = await asyncio.gather(*(start(c) for _ in range(4)))
        assert [ids_of(messages) for messages in answers] == [tokens_of(PROMPT, 6, 400)] * 4
        assert not waiting.done()
        worker.refused_adapters.clear()
        assert len(ids_of(await waiting)) == 6
        await c.idle()


async def test_requests_of_an_adapter_wait_for_the_only_decode_worker_too(cluster):
    async with cluster(0, 1) as c:
        worker, link = c.decode[0], c.gateway.registry.decode[0]
        worker.hello.adapters.add(name="tabs", identity=b"a" * 32)
        await worker.stop()
        await c.until(lambda: not link.is_serving)
        await worker.start(worker.port)
        await c.until(lambda: link.is_serving)
        await worker.stop()
        await c.until(lambda: not link.is_serving)
        coming = start(c, model="tabs")
        await asyncio.sleep(0.5)
        assert not coming.done()
        worker.hello.epoch = worker.epoch = 7
        await worker.start(worker.port)
        assert ids_of(await coming) == tokens_of(PROMPT, 6, 400)


@pytest.mark.parametrize("refusals", [["queue_full"], ["too_long", "too_long"]])
async def test_a_prompt_is_counted_as_work_of_who_reads_it(cluster, monkeypatch, refusals):
    """Of the second prefill worker, or where both say that it is too long of the decode worker."""
    given = defaultdict[RecentLoad, float](float)
    monkeypatch.setattr(RecentLoad, "add", lambda recent, seconds, at: given.update({recent: given[recent] + seconds}))
    async with cluster(2) as c:
        for worker in c.prefill:
            worker.refusals = refusals  # of both together
        assert ids_of(await start(c)) == tokens_of(PROMPT, 6, 400)
        ((record, _, _),), (writer,) = c.gateway.recent.last, c.gateway.registry.decode
        refused_by = [retry.worker for retry in record.retries]
        (reader, *_) = [link for link in c.gateway.registry.links if link.name not in refused_by]
        expected = Counter({reader.recent_load: record.decision.prefill_s}) + Counter(
            {writer.recent_load: record.decision.decode_s}
        )
        assert {recent: seconds for recent, seconds in given.items() if seconds} == pytest.approx(expected)
