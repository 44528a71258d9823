"""A request through the gateway between FakeWorkers: orders, tokens, text, endings."""

import asyncio

import grpc
import pytest

from baton.protocol import PREFILL_ON_ADMIT
from baton.v1 import fleet_pb2
from baton.v1 import inference_pb2 as pb
from tests.gateway.calls import PROMPT, generate, ids_of
from tests.support.client import make_request, read_error
from tests.support.gateway.fake_worker import tokens_of
from tests.support.pace import patience


async def test_one_worker_reads_the_prompt_and_another_answers(cluster):
    async with cluster() as c:
        messages = await generate(c, max_tokens=12)
        assert ids_of(messages) == tokens_of(PROMPT, 12, 400)
        assert messages[0].HasField("seed") and messages[0].request_id
        assert not any(message.HasField("seed") for message in messages[1:])
        last = messages[-1]
        assert last.finish_reason == pb.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.output_tokens) == (300, 12)
        assert (last.usage.draft_tokens, last.usage.accepted_tokens) == (5, 3)
        assert c.decode[0].kinds()[:3] == ["admit", "fetch", "start"]
        assert c.prefill[0].kinds()[0] == "prefill"
        await c.idle()


async def test_answers_are_expected_to_be_as_long_as_recent_ones(cluster):
    async with cluster() as c:
        c.pipeline.mean_output = 16.0
        await generate(c, max_tokens=6)
        await c.until(lambda: not c.pipeline.running)
        assert c.pipeline.mean_output == pytest.approx(16 - 0.02 * 10)
        await generate(c, max_tokens=100)
        await c.until(lambda: len(c.gateway.recent.last) == 2)
        assert c.gateway.recent.last[-1].record.routing_request.num_output == pytest.approx(15.8)


async def test_a_prompt_waits_on_a_worker_until_it_is_read(cluster):
    async with cluster(num_prefill=0) as c:
        (worker,), (link,) = c.decode, c.gateway.registry.decode
        worker.hold("prefill"), worker.hold("decode")
        answer = asyncio.create_task(generate(c, max_tokens=12))
        await c.until(lambda: link.num_prefill_tokens == len(PROMPT))
        worker.release("prefill")
        await c.until(lambda: any(each.request.answer.has_begun for each in c.pipeline.running.values()))
        assert link.legs and link.num_prefill_tokens == 0
        worker.release("decode")
        assert len(ids_of(await answer)) == 12


async def test_what_operators_see_of_a_running_request(cluster):
    async with cluster() as c:
        c.prefill[0].hold("prefill"), c.decode[0].hold("decode")
        answer = asyncio.create_task(generate(c, max_tokens=12))
        await c.until(lambda: "prefill" in c.prefill[0].kinds() and "fetch" in c.decode[0].kinds())
        (seen,) = c.gateway.recent.listed(fleet_pb2.ListRequestsRequest(), 0).running
        assert (seen.phase, seen.prompt_tokens, seen.output_tokens) == ("prefill", 300, 0)
        c.prefill[0].release("prefill")
        await c.until(lambda: "start" in c.decode[0].kinds())
        (seen,) = c.gateway.recent.listed(fleet_pb2.ListRequestsRequest(), 0).running
        assert (seen.phase, seen.output_tokens) == ("decode", 1)
        c.decode[0].release("decode")
        assert len(ids_of(await answer)) == 12


async def test_timing_adds_up(cluster):
    async with cluster() as c:
        timing = (await generate(c, max_tokens=5))[-1].timing
        phases = (timing.tokenize_s, timing.route_s, timing.admit_s, timing.prefill_queue_s, timing.prefill_s)
        assert sum(phases) + timing.first_delivery_s == pytest.approx(timing.ttft_s, abs=1e-9)
        second = (timing.kv_wait_s, timing.decode_queue_s, timing.first_step_s, timing.second_delivery_s)
        assert min(*phases, *second, timing.first_delivery_s) >= 0
        assert timing.ttft_s + sum(second) <= timing.total_s and timing.tpot_s > 0
        assert timing.transfer_s == pytest.approx(0.004) and timing.transfer_hidden_s == pytest.approx(0.003)


@pytest.mark.parametrize("commands", (["admit"], ["admit", "prefill"]))
async def test_a_decode_worker_reads_the_prompt_itself(cluster, commands):
    """A worker that can reads the prompt as soon as it has granted credit; another one is asked to."""
    async with cluster(num_prefill=0) as c:
        if len(commands) > 1:
            c.decode[0].hello.features.remove(PREFILL_ON_ADMIT)
            link = c.gateway.registry.decode[0]
            link.session.hang_up("a test ends it")
            await c.until(lambda: link.is_serving and PREFILL_ON_ADMIT not in link.limits.features)
        messages = await generate(c, max_tokens=6)
        assert ids_of(messages) == tokens_of(PROMPT, 6, 400)
        assert c.decode[0].kinds() == commands
        assert messages[-1].timing.transfer_s == 0
        await c.idle()


async def test_a_hot_decode_cache_prefills_there(cluster):
    async with cluster(split="auto") as c:
        first = await generate(c, max_tokens=3)
        await c.spread()
        again = await generate(c, max_tokens=3)
        assert first[-1].usage.cached_tokens == 0 and again[-1].usage.cached_tokens == 256
        assert c.decode[0].commands[-1][1].prefill
        assert ids_of(again) == ids_of(first)


async def test_the_first_token_is_the_last(cluster):
    async with cluster() as c:
        messages = await generate(c, max_tokens=1)
        assert len(messages) == 1 and messages[0].usage.output_tokens == 1
        await c.idle()
        assert c.decode[0].kinds() == ["admit", "fetch", "cancel"]
        assert c.decode[0].commands[-1][1].answered


async def test_each_choice_has_its_tokens_and_its_end(cluster):
    async with cluster() as c:
        messages = await generate(c, max_tokens=7, n=3, temperature=1.0, logprobs=0)
        for index in range(3):
            assert ids_of(messages, index) == tokens_of(PROMPT, 7, 400, index)
            ends = [message for message in messages if message.index == index and message.finish_reason]
            assert len(ends) == 1 and ends[0] is [m for m in messages if m.index == index][-1]
        assert all(len(message.logprobs) == len(message.token_ids) for message in messages)
        assert messages[-1].usage.output_tokens == 21
        assert sum(message.HasField("usage") for message in messages) == 1
        await c.idle()


async def test_text_is_detokenize(cluster):
    async with cluster() as c:
        messages = await generate(c, "Größe 東京", max_tokens=60)
        text = (await c.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids_of(messages)))).text
        assert "".join(message.text for message in messages) == text


async def test_a_stop_string_cancels(cluster):
    async with cluster() as c:
        free = "".join(message.text for message in await generate(c, max_tokens=60))
        begin = next(i for i in range(20, 60) if "\ufffd" not in free[i : i + 5])
        stop = free[begin : begin + 5]
        messages = await generate(c, max_tokens=500, stop=["never", stop])
        assert "".join(message.text for message in messages) == free[: free.index(stop)]
        assert messages[-1].matched_stop == stop and messages[-1].finish_reason == pb.FINISH_REASON_STOP
        assert len(ids_of(messages)) < 70
        kind, message = c.decode[0].commands[-1]
        assert kind == "cancel" and message.answered, "the worker has done its part, and nobody went away"
        await c.idle()


async def test_a_stop_token_is_in_the_ids_only(cluster):
    async with cluster() as c:
        expected = tokens_of(PROMPT, 20, 400)
        stop_id = expected[6]
        cut = expected.index(stop_id) + 1
        messages = await generate(c, max_tokens=20, stop_token_ids=[stop_id])
        assert ids_of(messages) == expected[:cut]
        text = (await c.stub.Detokenize(pb.DetokenizeRequest(token_ids=expected[: cut - 1]))).text
        assert "".join(message.text for message in messages) == text


async def test_complete_is_the_same(cluster):
    async with cluster() as c:
        answer = await c.stub.Complete(
            make_request(PROMPT, max_tokens=9, n=2, seed=3, request_id="mine"), timeout=patience(20)
        )
        assert [list(choice.token_ids) for choice in answer.choices] == [tokens_of(PROMPT, 9, 400, i) for i in (0, 1)]
        assert answer.seed == 3 and answer.request_id == "mine" and answer.usage.output_tokens == 18
        assert answer.timing.ttft_s > 0


async def test_many_at_once(cluster):
    async with cluster(num_prefill=2, num_decode=2) as c:
        prompts = [list(range(20 + i, 150 + i)) for i in range(24)]
        for prompt, messages in zip(prompts, await asyncio.gather(*(generate(c, p, max_tokens=9) for p in prompts))):
            assert ids_of(messages) == tokens_of(prompt, 9, 400)
        assert all("admit" in worker.kinds() for worker in c.decode)
        await c.idle()


async def test_request_id_in_use(cluster):
    async with cluster() as c:
        c.prefill[0].hold("prefill")
        running = asyncio.create_task(generate(c, request_id="mine", max_tokens=2))
        await c.until(lambda: c.prefill[0].held)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(c, request_id="mine", max_tokens=2)
        assert read_error(caught.value).code == grpc.StatusCode.ALREADY_EXISTS
        c.prefill[0].release("prefill")
        assert len(ids_of(await running)) == 2
        assert (await generate(c, request_id="mine", max_tokens=2))[0].request_id == "mine"


async def test_info_and_health(cluster):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with cluster() as c:
        info = await c.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.name, info.context, info.vocab_size, list(info.transports)) == ("fake", 1024, 400, ["tcp"])
        watch = health_pb2_grpc.HealthStub(c.channel).Watch(health_pb2.HealthCheckRequest())
        serving = health_pb2.HealthCheckResponse.SERVING
        while (await watch.read()).status != serving:
            pass
        await c.decode[0].stop()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
