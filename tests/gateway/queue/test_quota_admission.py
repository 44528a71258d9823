"""Quotas, service levels and lines at the door, through a gateway between FakeWorkers."""

import asyncio

import grpc
import pytest

from baton.service.clock import now
from gateway.api.owned_request import OwnedRequest
from gateway.api.request_handler import CallContext
from gateway.queue.waiting_queue import QueuedRequest
from tests.gateway.calls import (
    PROMPT,
    expect_refusal,
    generate,
    hold,
    read,
    release,
    start,
    wait_for_gate,
    write_quotas,
)
from tests.gateway.observe.samples import samples
from tests.support.client import make_request
from tests.support.pace import patience


def of_class(c, slo_class: str, **fields):
    request = make_request(PROMPT, max_tokens=6, **fields)
    request.slo_class = slo_class
    return read(c.stub.Generate(request, timeout=patience(20)))


def line_up(c, wait_s: float) -> tuple:
    """Put a request in line for a prefill worker, behind which others would wait that long."""
    queue = c.pipeline.queues.prefill
    queue._served_tokens, queue._served_s = 1000.0, 1.0
    return queue, queue.join(QueuedRequest(-1e9, round(1000 * wait_s)), lambda: None)


async def test_requests_at_once(cluster, tmp_path):
    async with cluster(quotas=write_quotas(tmp_path, "[default]\nconcurrent_requests = 2\n")) as c:
        hold(c, "decode")
        running = [start(c), start(c)]
        await c.until(lambda: c.gateway.handler.num_running == 2)
        error = await expect_refusal(generate(c))
        assert (error.code.name, error.reason) == ("RESOURCE_EXHAUSTED", "TENANT_REQUESTS")
        assert "concurrent_requests" in error.message and error.retry_after_s > 0
        release(c, "decode")
        await asyncio.gather(*running)
        assert await generate(c, max_tokens=2)


async def test_tokens_a_second(cluster, tmp_path):
    text = "[default]\ntokens_per_s = 0.001\nburst_tokens = 400\n"
    async with cluster(quotas=write_quotas(tmp_path, text)) as c:
        assert await generate(c, max_tokens=90)  # 390 of 400
        assert await generate(c, max_tokens=2)  # what is begun is served
        error = await expect_refusal(generate(c))
        assert (error.code.name, error.reason) == ("RESOURCE_EXHAUSTED", "TENANT_TOKENS")
        assert "tokens_per_s" in error.message and error.retry_after_s > 0


def balance_of(c) -> int:
    usage = c.pipeline.admission.quotas._buckets.get("default")
    return round(usage.balance(now())) if usage else 0


async def test_who_names_no_length_sets_a_usual_one_aside_and_pays_for_all(cluster, tmp_path):
    """An answer may be as long as the context, 724 tokens behind this prompt; 256 of them are set aside."""
    text = "[default]\ntokens_per_s = 0.001\nburst_tokens = 1300\n"
    async with cluster(quotas=write_quotas(tmp_path, text)) as c:
        hold(c, "decode")
        running = [start(c, max_tokens=None) for _ in range(2)]
        await c.until(lambda: balance_of(c) == 1300 - 2 * (300 + 256))
        release(c, "decode")
        for messages in await asyncio.gather(*running):
            assert messages[-1].usage.output_tokens == 724
        await c.until(lambda: not c.pipeline.admission.key_ids)
        assert balance_of(c) == 1300 - 2 * 1024
        assert (await expect_refusal(generate(c))).reason == "TENANT_TOKENS"


async def test_what_is_beyond_the_reservation_is_paid_as_it_is_sent(cluster, tmp_path):
    text = "[default]\ntokens_per_s = 0.001\nburst_tokens = 400\n"
    async with cluster(quotas=write_quotas(tmp_path, text)) as c:
        num_sent = 0

        async def emit(message):
            nonlocal num_sent
            num_sent += len(message.token_ids)
            assert balance_of(c) == 400 - 300 - max(256, num_sent)

        await c.gateway.handler.generate(OwnedRequest(make_request(PROMPT)), CallContext(), emit)
        assert num_sent == 724


async def test_an_answer_that_ends_early_costs_what_it_is(cluster, tmp_path):
    text = "[default]\ntokens_per_s = 0.001\nburst_tokens = 400\n"
    async with cluster(quotas=write_quotas(tmp_path, text)) as c:
        for worker in c.workers:
            worker.script = [20, 21, 22, 0]
        await generate(c)
        await c.until(lambda: not c.pipeline.admission.key_ids)
        assert balance_of(c) == 400 - 304


@pytest.mark.parametrize("num_parked, num_charged", [(5, 2 * 6 - (2 + 4)), (3, 2 * 6 - (2 + 3)), (0, 300 + 2 * 6)])
async def test_who_resumes_pays_for_what_is_computed_anew(cluster, tmp_path, num_parked, num_charged):
    """Where a worker has the sequence yet, prompt and tokens up to there are paid for; not more of them than it has,
    whatever the client says. It may be lost later on."""
    text = "[default]\ntokens_per_s = 0.001\nburst_tokens = 1000\n"
    async with cluster(quotas=write_quotas(tmp_path, text)) as c:
        fields = {"request_id": "again", "seed": 1, "max_tokens": 6, "n": 2}
        if num_parked:
            c.park(prompt=PROMPT, **fields)
            c.decode[0].num_parked_tokens = num_parked
        assert await generate(c, resume_from=[2, 4], **fields)
        await c.until(lambda: not c.pipeline.admission.key_ids)
        assert balance_of(c) == 1000 - num_charged


async def test_choices_at_once(cluster, tmp_path):
    async with cluster(quotas=write_quotas(tmp_path, "[default]\nconcurrent_requests = 8\n")) as c:
        hold(c, "decode")
        running = [start(c, n=5), start(c, n=3)]
        await c.until(lambda: c.gateway.handler.num_running == 2)
        assert (await expect_refusal(generate(c))).reason == "TENANT_REQUESTS"
        release(c, "decode")
        await asyncio.gather(*running)
    async with cluster(quotas=write_quotas(tmp_path, "[default]\nconcurrent_requests = 3\n")) as c:
        error = await expect_refusal(generate(c, n=4))
        assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", ("sampling.n",))


async def test_what_a_request_may_come_to_is_set_aside(cluster, tmp_path):
    text = "[default]\ntokens_per_s = 0.001\nburst_tokens = 2000\n"
    async with cluster(quotas=write_quotas(tmp_path, text)) as c:
        hold(c, "decode")
        running = start(c, n=8, max_tokens=300)  # 300 + 8 x 300
        await wait_for_gate(c, "decode")
        assert (await expect_refusal(generate(c))).reason == "TENANT_TOKENS"
        running.cancel()
        release(c, "decode")
        await c.until(lambda: c.gateway.handler.num_running == 0)
        assert await generate(c, max_tokens=2)


async def test_a_priority_needs_a_right(cluster, tmp_path):
    async def sent(c, priority: int) -> int:
        request = make_request(PROMPT, max_tokens=2)
        request.priority = priority
        await read(c.stub.Generate(request, timeout=patience(20)))
        return [admit.spec.priority for kind, admit in c.decode[0].commands if kind == "admit"][-1]

    async with cluster() as c:
        assert [await sent(c, priority) for priority in (7, 0, -7)] == [0, 0, -7]
    async with cluster(quotas=write_quotas(tmp_path, "[default]\nmax_priority = 5\n")) as c:
        assert [await sent(c, priority) for priority in (7, 3, -7)] == [5, 3, -7]


# How a request may end, and what it has used by then: its prompt, if a worker has read it or did so as the client left,
# and what was written.
ENDINGS = {
    "answered": 310, "cancelled": 302, "cancelled in a fetch": 300, "deadline": 300, "deadline at a worker's door": 0,
    "too late": 0, "too long": 0, "failed": 302, "failed to read": 0, "superseded": 301 + 306,
}  # fmt: skip


async def end(c, how: str) -> None:
    """One request that ends so."""
    if how == "answered":
        assert await generate(c, max_tokens=5, n=2)
    elif how.startswith("cancelled"):
        gate = "prefill" if how.endswith("fetch") else "decode"
        hold(c, gate)
        call = c.stub.Generate(make_request(PROMPT, max_tokens=6, n=2), timeout=patience(20))
        await wait_for_gate(c, "fetch" if how.endswith("fetch") else gate)
        call.cancel()  # a task that is cancelled between two reads leaves its call as it is
        await c.until(lambda: c.gateway.handler.num_running == 0)
        release(c, gate)
    elif how.startswith("deadline"):
        gate = "accept" if how.endswith("door") else "prefill"
        hold(c, gate)
        running = start(c)
        await wait_for_gate(c, "accept" if gate == "accept" else "fetch")
        (machine,) = c.pipeline.running.values()
        machine.request.deadline = now()
        machine.request.post_capacity()  # it looks at the time
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await running
        release(c, gate)
    elif how == "too late":
        line, place = line_up(c, 5.0)
        assert (await expect_refusal(of_class(c, "standard"))).reason == "TTFT_BUDGET"
        line.leave(place, served=False)
        line._served_tokens = line._served_s = 0.0
    elif how == "too long":
        assert (
            await expect_refusal(generate(c, list(range(20, 320)) * 3, max_tokens=800))
        ).code.name == "INVALID_ARGUMENT"
    elif how.startswith("failed"):
        worker, step = (c.prefill[0], "prefill") if how.endswith("read") else (c.decode[0], "decode")
        worker.failures[step] = [(13, "ENGINE_FAILED")] * 10
        await expect_refusal(generate(c))
        worker.failures.clear()
    elif how == "superseded":
        hold(c, "decode")
        fields = {"request_id": "again", "seed": 1, "max_tokens": 6}
        first = asyncio.create_task(generate(c, **fields))
        await wait_for_gate(c, "decode")
        second = asyncio.create_task(generate(c, resume_from=[0], **fields))
        with pytest.raises(grpc.aio.AioRpcError):
            await first
        release(c, "decode")
        assert await second
    await c.until(lambda: c.gateway.handler.num_running == 0)
    await c.idle()
    for worker in c.workers:
        worker.commands.clear()


@pytest.mark.parametrize("how", ENDINGS)
async def test_what_is_set_aside_is_settled_however_a_request_ends(cluster, tmp_path, how):
    text = "[default]\ntokens_per_s = 0.001\nburst_tokens = 100000\nconcurrent_requests = 8\n"
    async with cluster(quotas=write_quotas(tmp_path, text)) as c:
        held = c.gateway._quotas.enter("default", now())  # it stays while this one runs
        await end(c, how)
        usage = c.gateway._quotas._buckets["default"]
        assert usage.num_running == 1
        assert usage.num_reserved - usage.num_returned == ENDINGS[how]
        held.settle(0, now())


async def test_a_request_that_names_its_class_is_refused_where_it_would_be_late(cluster):
    async with cluster() as c:
        line, place = line_up(c, 2.0)
        error = await expect_refusal(of_class(c, "standard"))
        assert (error.code.name, error.reason) == ("RESOURCE_EXHAUSTED", "TTFT_BUDGET") and error.retry_after_s > 0
        # It names none, or one without a bound: it waits.
        waiting = [start(c), asyncio.create_task(of_class(c, "batch"))]
        await c.until(lambda: len(line) == 3)
        line.leave(place)
        assert all(await asyncio.gather(*waiting))
        assert await of_class(c, "standard")
        await c.idle()


async def test_one_that_has_waited_for_its_turn_is_served_however_late(cluster):
    async with cluster() as c:
        c.decode[0].refusals = ["kv_full"] * 100_000
        waiting = [start(c)]
        await c.until(lambda: len(c.pipeline.queues.credit) == 1)
        waiting.append(asyncio.create_task(of_class(c, "standard")))
        await c.until(lambda: len(c.pipeline.queues.credit) == 2)
        line, place = line_up(c, 5.0)
        c.decode[0].refusals = []
        await c.until(lambda: len(line) == 3 or any(each.done() for each in waiting))
        line.leave(place)
        assert all(await asyncio.gather(*waiting))
        await c.idle()


async def test_nobody_waits_for_what_would_take_longer_than_the_longest_wait(cluster):
    async with cluster(max_queue_wait_s=2.0) as c:
        line_up(c, 3.0)
        assert (await expect_refusal(generate(c))).reason == "TTFT_BUDGET"


async def test_who_would_be_served_after_its_deadline_is_told_at_once(cluster):
    async with cluster() as c:
        line, place = line_up(c, 5.0)
        request = make_request(PROMPT, max_tokens=6)
        error = await expect_refusal(read(c.stub.Generate(request, timeout=3)))
        assert (error.code.name, error.reason) == ("RESOURCE_EXHAUSTED", "DEADLINE_BUDGET")
        assert "deadline" in error.message and error.retry_after_s >= 1
        waiting = asyncio.create_task(read(c.stub.Generate(request, timeout=patience(20))))
        await c.until(lambda: len(line) == 2)
        line.leave(place)
        assert await waiting


async def test_a_promise_of_tokens_is_not_broken_by_one_more(cluster):
    async with cluster() as c:
        (link,) = c.gateway.registry.decode
        for i in range(20):
            link.pace_estimator.note_decode(1 + i % 5, 0.01 + 0.03 * (1 + i % 5), 0.0)
        hold(c, "decode")
        running = [start(c), start(c)]
        await wait_for_gate(c, "decode")
        await c.until(lambda: len(link.legs) == 2)
        assert (await expect_refusal(of_class(c, "interactive"))).reason == "TPOT_BUDGET"
        release(c, "decode")
        await asyncio.gather(*running)
        await c.until(lambda: not link.load.num_running)
        assert await of_class(c, "interactive")  # alone it may be as slow as it is


async def test_the_lines_are_bounded_in_tokens(cluster):
    async with cluster(max_queued_tokens=400) as c:
        c.prefill[0].refusals = ["queue_full"] * 100_000
        waiting = start(c)
        await c.until(lambda: len(c.pipeline.queues.prefill) == 1)
        assert (await expect_refusal(generate(c))).reason == "QUEUE_TOKENS"
        c.prefill[0].refusals = []
        assert await waiting


async def test_what_a_promise_holds_is_let_go(cluster):
    async with cluster() as c:
        assert await of_class(c, "interactive")
        await c.idle()
        for link in c.gateway.registry.links:
            assert not link.slo_tpots_s and link.num_prefill_tokens == 0


async def test_how_requests_were_routed_is_counted(cluster):
    async with cluster() as c:
        await generate(c, max_tokens=2)
        await c.until(lambda: c.gateway.handler.num_running == 0)
        seen = samples(c.gateway.meters)
        assert seen["baton_routes_total", "forced", "split"] == 1
        assert seen["baton_route_cost_seconds_count", "taken"] == seen["baton_route_cost_seconds_count", "other"] == 1


async def test_workers_tell_tenants_apart_and_learn_no_names(cluster):
    async with cluster() as c:
        hashes = c.pipeline.prefix_hashes
        marks = {hashes.mark(tenant) for tenant in ("acme", "bravo", "default")}
        assert len(marks) == 3 and hashes.mark("acme") == hashes.mark("acme") and hashes.mark("default") == b""
        assert not any(b"acme" in mark or len(mark) > 32 for mark in marks)
