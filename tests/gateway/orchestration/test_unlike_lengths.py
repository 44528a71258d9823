"""Workers that hold unlike lengths: an answer is ended by its max_tokens alone, and no worker is asked for what it
cannot hold."""

import asyncio

import grpc
import pytest

from baton.protocol import PROMPT_LOGPROBS
from baton.v1 import inference_pb2 as pb
from tests.gateway.calls import expect_refusal, generate, ids_of
from tests.support.client import make_request
from tests.support.gateway.fake_worker import FakeWorker, tokens_of
from tests.support.gateway.registration import register
from tests.support.pace import patience

LENGTH = pb.FINISH_REASON_LENGTH
PROMPT = list(range(10, 60))  # with 400 tokens behind it more than 256, and less than 1,024
LONG = dict(prompt=PROMPT, max_tokens=400, ignore_eos=True)


async def read_some(call, num_tokens: int = 1 << 20) -> list[pb.GenerateResponse]:
    """Return the messages of as many tokens, or all that are left. A message has more than one where steps come faster
    than they are written."""
    messages: list[pb.GenerateResponse] = []
    while len(ids_of(messages)) < num_tokens and (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def say_again(c, worker) -> None:
    """The gateway has what the worker's Hello says now."""
    link = next(link for link in c.gateway.registry.links if link.address == worker.address)
    before = link.hello
    link.session.hang_up("a test ends it")
    await c.until(lambda: link.is_serving and link.hello is not before)


async def test_a_request_goes_only_where_all_of_it_fits(cluster):
    async with cluster(0, (1024, 256)) as c:
        long, short = c.decode
        answers = await asyncio.gather(*(generate(c, **LONG) for _ in range(12)))
        assert [ids_of(messages) for messages in answers] == [tokens_of(PROMPT, 400, 400)] * 12
        assert "admit" not in short.kinds() and long.kinds().count("admit") == 12
        fitting = [generate(c, prompt=PROMPT, max_tokens=200, ignore_eos=True) for _ in range(12)]
        assert [ids_of(messages) for messages in await asyncio.gather(*fitting)] == [tokens_of(PROMPT, 200, 400)] * 12
        assert "admit" in short.kinds()  # a small worker is not idle


async def test_who_names_no_length_is_served_by_all(cluster):
    async with cluster(0, (1024, 400)) as c:
        answers = await asyncio.gather(*(generate(c, prompt=PROMPT, ignore_eos=True) for _ in range(12)))
        assert [ids_of(messages) for messages in answers] == [tokens_of(PROMPT, 350, 400)] * 12
        assert all("admit" in worker.kinds() for worker in c.decode)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_worker_that_ends_at_its_own_length_ends_nothing(cluster, n):
    """As one of another version might: another one continues."""
    async with cluster(0, 2) as c:
        whole, early = c.decode
        whole.refusals, early.ends_at = ["kv_full"], 256
        messages = await generate(c, n=n, **LONG)
        for choice in range(n):
            assert ids_of(messages, choice) == tokens_of(PROMPT, 400, 400, choice)
        assert messages[-1].finish_reason == LENGTH
        assert early.kinds()[0] == "admit" and "admit" in whole.kinds()
        await c.idle()


async def test_a_first_token_is_no_end_for_the_length_of_who_read_the_prompt(cluster):
    async with cluster(1, 1) as c:
        c.prefill[0].ends_at = len(PROMPT) + 1
        assert ids_of(await generate(c, prompt=PROMPT, max_tokens=20, ignore_eos=True)) == tokens_of(PROMPT, 20, 400)
        assert c.decode[0].kinds() == ["admit", "fetch", "start"]


async def test_the_longer_one_dies_in_mid_stream(cluster):
    """The shorter one cannot continue, and the client is not refused for having asked for too much."""
    async with cluster(0, (1024, 256), max_start_wait_s=0) as c:
        long, _ = c.decode
        long.holds_at = 300
        call = c.stub.Generate(make_request(**LONG), timeout=patience(20))
        got = await read_some(call, 300)
        await long.stop()
        said = await expect_refusal(read_some(call))
        assert len(ids_of(got)) == 300 and said.code == grpc.StatusCode.UNAVAILABLE
        assert said.reason == "DECODE_WORKER_LOST" and said.retry_after_s
        await c.until(lambda: not c.gateway.registry.decode[0].is_serving)
        for _ in range(2):  # it may come back: a request for it is not wrong
            said = await expect_refusal(generate(c, **LONG))
            assert said.code == grpc.StatusCode.UNAVAILABLE and said.reason == "NO_WORKER" and said.retry_after_s
            assert "can hold 450 tokens" in said.message
        await generate(c, prompt=PROMPT, max_tokens=100)


async def test_another_of_the_same_length_goes_on(cluster):
    async with cluster(0, (1024, 256, 1024)) as c:
        for worker in c.decode:
            worker.holds_at = 300
        call = c.stub.Generate(make_request(**LONG), timeout=patience(20))
        got = await read_some(call, 300)
        busy = next(worker for worker in c.decode if worker.held)
        await busy.stop()
        messages = got + await read_some(call)
        assert ids_of(messages) == tokens_of(PROMPT, 400, 400) and messages[-1].finish_reason == LENGTH
        assert "admit" not in c.decode[1].kinds()


async def test_a_request_that_nobody_can_hold_is_told_at_once(cluster):
    async with cluster(0, (512, 256)) as c:
        said = await expect_refusal(generate(c, prompt=PROMPT, max_tokens=463))
        assert said.code == grpc.StatusCode.INVALID_ARGUMENT and said.fields == ("stopping.max_tokens",)
        assert (
            "50 + 463 > 512, the maximum context length that a decode worker here holds: 462 are left" in said.message
        )
        said = await expect_refusal(generate(c, prompt=PROMPT * 11, max_tokens=1))
        assert said.fields == ("token_ids.ids",) and "holds is 512" in said.message
        assert [worker.kinds() for worker in c.decode] == [[], []]
        await generate(c, prompt=PROMPT, max_tokens=462)


@pytest.mark.parametrize("max_start_wait_s", [0, 30])
async def test_one_of_which_nothing_is_known_yet_may_hold_it(cluster, digest, max_start_wait_s):
    """As when a gateway starts, and hears the shorter one first."""
    late = await FakeWorker("decode", digest, 400).start()
    late.hold("hello")
    async with cluster(0, (256,), max_start_wait_s=max_start_wait_s) as c:
        c.workers.append(late)
        said = await expect_refusal(generate(c, **LONG))
        assert said.code == grpc.StatusCode.INVALID_ARGUMENT and said.reason == "CONTEXT_LENGTH_EXCEEDED"
        await register(c, late.address)
        await c.until(lambda: late.commands)
        if max_start_wait_s:
            waiting = asyncio.create_task(generate(c, **LONG))
            await c.until(lambda: len(c.pipeline.queues.decode_start))
        else:
            said = await expect_refusal(generate(c, **LONG))
            assert said.code == grpc.StatusCode.UNAVAILABLE and said.reason == "NO_WORKER" and said.retry_after_s
            waiting = None
        assert len(ids_of(await generate(c, prompt=PROMPT, ignore_eos=True))) == 256 - len(PROMPT)
        late.release("hello")
        await c.until(lambda: all(link.is_serving for link in c.gateway.registry.links))
        assert ids_of(await (waiting or generate(c, **LONG))) == tokens_of(PROMPT, 400, 400)
        said = await expect_refusal(generate(c, prompt=PROMPT, max_tokens=1000))
        assert said.reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_a_context_that_rope_stretches_is_what_workers_hold(cluster, digest):
    """As with yarn: config.json says 1,024, the worker holds four times as much. Of it a shorter one is known as
    well."""
    prompt = [10 + i % 300 for i in range(3000)]
    late = await FakeWorker("decode", digest, 400).start()
    late.hold("hello")
    async with cluster(0, (4096, 2048), max_start_wait_s=0) as c:
        c.workers.append(late)
        for is_whole in (True, False):
            assert (await c.stub.GetModelInfo(pb.GetModelInfoRequest())).context == 4096
            messages = await generate(c, prompt=prompt, max_tokens=20, ignore_eos=True)
            assert ids_of(messages) == tokens_of(prompt, 20, 400)
            assert c.fleet.model.lengths == (2048, 4096) and c.fleet.model.is_whole == is_whole
            said = await expect_refusal(generate(c, prompt=prompt, max_tokens=1097))
            assert "3000 + 1097 > 4096, the maximum context length: 1096 are left" in said.message
            await register(c, late.address)
            await c.until(lambda: late.commands)
        late.release("hello")


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_context_that_rope_stretches_is_known_of_any_worker(cluster, digest, role):
    """As with yarn where the decode worker that holds all of it starts, and comes again: a shorter one is known, or one
    that reads."""
    late = await FakeWorker("decode", digest, 400, context=4096).start()
    late.hold("hello")
    known = {"decode": (0, (512,)), "prefill": ((512,), 0)}[role]
    async with cluster(*known, max_start_wait_s=0, split="auto") as c:
        c.workers.append(late)
        for worker in (*c.prefill, *c.decode):
            worker.hello.limits.model_context = 4096
            await say_again(c, worker)
        long = dict(prompt=[10 + i % 300 for i in range(3000)], max_tokens=20, ignore_eos=True)
        if role == "decode":
            said = await expect_refusal(generate(c, **long))
            assert said.reason == "CONTEXT_LENGTH_EXCEEDED" and "decode worker here holds is 512" in said.message
        else:
            assert (await expect_refusal(generate(c, **long))).reason == "NO_WORKER"
        await register(c, late.address)
        await c.until(lambda: late.commands)
        said = await expect_refusal(generate(c, **long))
        assert said.code == grpc.StatusCode.UNAVAILABLE and said.reason == "NO_WORKER"
        said = await expect_refusal(generate(c, **long | dict(max_tokens=1097)))
        assert said.reason == "CONTEXT_LENGTH_EXCEEDED"
        assert "3000 + 1097 > 4096, the maximum context length: 1096 are left" in said.message
        late.release("hello")
        await c.until(lambda: all(link.is_serving for link in c.gateway.registry.links))
        assert ids_of(await generate(c, **long)) == tokens_of(long["prompt"], 20, 400)


async def test_a_worker_that_holds_less_than_rope_stretches_is_told(cluster):
    """config.json says 1,024, the model holds 8,192, and the worker a half of it."""
    async with cluster(0, (4096,)) as c:
        c.decode[0].hello.limits.model_context = 8192
        await say_again(c, c.decode[0])
        said = await expect_refusal(generate(c, prompt=PROMPT, max_tokens=4047))
        assert "50 + 4047 > 4096, the maximum context length that a decode worker here holds" in said.message


async def test_one_that_was_tried_in_vain_holds_nothing(cluster, digest):
    gone = await FakeWorker("decode", digest, 400).start()
    await gone.stop()
    async with cluster(0, (256,), max_start_wait_s=0) as c:
        await register(c, gone.address)
        await c.until(lambda: any(link.num_failed_sessions for link in c.gateway.registry.links))
        said = await expect_refusal(generate(c, **LONG))
        assert said.code == grpc.StatusCode.INVALID_ARGUMENT and said.reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_choices_need_blocks(cluster):
    """Choices of 16 tokens each; the prompt fills 31 of 32 blocks and a part of one."""
    async with cluster(0, (512, 512)) as c:
        prompt = (PROMPT * 10)[:497]
        for worker, num_blocks in zip(c.decode, (32, 40), strict=True):
            worker.hello.limits.num_blocks, worker.hello.limits.block_size = num_blocks, 16
            await say_again(c, worker)
        for _ in range(6):
            assert len(await generate(c, prompt=prompt, max_tokens=4, n=8))
        assert c.decode[0].kinds() == [] and c.decode[1].kinds().count("admit") == 6
        c.decode[1].hello.limits.num_blocks = 33
        await say_again(c, c.decode[1])
        said = await expect_refusal(generate(c, prompt=prompt, max_tokens=4, n=8))
        assert said.code == grpc.StatusCode.INVALID_ARGUMENT and said.fields == ("sampling.n",)
        assert "the largest decode worker has 33 blocks" in said.message


async def test_one_worker_is_long_enough_and_another_can_do_it(cluster):
    async with cluster(0, (1024, 512)) as c:
        c.decode[0].hello.features.remove(PROMPT_LOGPROBS)
        await say_again(c, c.decode[0])
        said = await expect_refusal(generate(c, prompt=PROMPT, max_tokens=600, prompt_logprobs=0))
        assert said.code == grpc.StatusCode.INVALID_ARGUMENT and said.fields == ("model",)
        assert said.message.endswith("no decode worker that serves can hold 650 tokens and has prompt_logprobs")


@pytest.mark.parametrize("split", ["auto", "always"])
@pytest.mark.parametrize("num_tokens", [638, 639, 640, 641])
async def test_a_prompt_about_as_long_as_the_prefill_worker(cluster, split, num_tokens):
    prompt = [10 + i % 300 for i in range(num_tokens)]
    async with cluster((640,), (1024,), split=split) as c:
        messages = await generate(c, prompt=prompt, max_tokens=20, ignore_eos=True)
        assert ids_of(messages) == tokens_of(prompt, 20, 400)
        assert ("prefill" in c.prefill[0].kinds()) <= (num_tokens < 640)
        if split == "always" and num_tokens < 640:
            assert c.decode[0].kinds() == ["admit", "fetch", "start"]


@pytest.mark.parametrize("reason", ["too_long", "no_adapter"])
@pytest.mark.parametrize("split", ["auto", "always"])
async def test_a_prefill_worker_that_can_never_read_it_is_not_waited_for(cluster, split, reason):
    """Independent of the length that it reported: the decode worker reads the prompt alone, without waiting in line."""
    prompt = [10 + i % 300 for i in range(600)]
    async with cluster(2, 1, split=split) as c:
        for worker in c.prefill:
            worker.refusals = [reason] * 100
        messages = await generate(c, prompt=prompt, max_tokens=20, ignore_eos=True)
        assert ids_of(messages) == tokens_of(prompt, 20, 400)
        assert all(worker.kinds().count("prefill") <= 1 for worker in c.prefill)


@pytest.mark.parametrize("reason", ["too_long", "no_adapter"])
async def test_a_decode_worker_that_can_never_take_it_is_asked_once(cluster, reason):
    async with cluster(0, 2) as c:
        for worker in c.decode:
            worker.refusals = [reason] * 100
        said = await expect_refusal(generate(c, **LONG))
        assert said.code == grpc.StatusCode.UNAVAILABLE and said.reason == "NO_WORKER"
        assert [worker.kinds() for worker in c.decode] == [["admit"]] * 2
        c.decode[1].refusals = []
        assert ids_of(await generate(c, **LONG)) == tokens_of(PROMPT, 400, 400)


async def test_the_only_long_one_that_is_full_is_waited_for(cluster):
    """And not asked again and again meanwhile, since a short one is there."""
    async with cluster(0, (1024, 256)) as c:
        c.decode[0].refusals = ["kv_full"] * 5
        assert ids_of(await generate(c, **LONG)) == tokens_of(PROMPT, 400, 400)
        assert c.decode[0].kinds().count("admit") == 6 and c.decode[1].kinds() == []


async def test_what_goes_on_elsewhere_is_read_by_who_can_read_the_answer_too(cluster):
    """600 tokens fit the prefill worker, with 100 of the answer behind them no longer."""
    prompt = [10 + i % 300 for i in range(600)]
    async with cluster((640,), (1024, 1024), split="always") as c:
        for worker in c.decode:
            worker.holds_at = 100
        call = c.stub.Generate(make_request(prompt, max_tokens=200, ignore_eos=True), timeout=patience(20))
        got = await read_some(call, 100)
        await next(worker for worker in c.decode if worker.held).stop()
        assert ids_of(got + await read_some(call)) == tokens_of(prompt, 200, 400)
        assert c.prefill[0].kinds().count("prefill") == 1
