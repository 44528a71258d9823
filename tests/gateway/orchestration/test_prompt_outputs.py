"""What is asked of a prompt, beside its answer: log-probabilities of its tokens, and the prompt itself."""

import pytest

from baton.v1 import inference_pb2 as pb
from gateway.link.worker_breaker import BreakerState
from tests.gateway.calls import PROMPT, expect_refusal, generate, ids_of
from tests.support.client import make_request
from tests.support.gateway.fake_worker import FakeWorker, tokens_of
from tests.support.pace import patience


async def test_prompt_logprobs_come_with_the_first_message(cluster):
    async with cluster() as c:
        await generate(c, max_tokens=3)  # the prompt is cached now
        first, *rest = await generate(c, prompt_logprobs=0, max_tokens=12)
        assert [each.chosen.token_id for each in first.prompt_logprobs] == PROMPT[1:]
        assert not any(message.prompt_logprobs or message.HasField("prompt") for message in rest)
        assert ids_of([first, *rest]) == tokens_of(PROMPT, 12, 400)
        (_, prefill) = [each for each in c.prefill[0].commands if each[0] == "prefill"][-1]
        assert not prefill.sources and prefill.spec.sampling.HasField("prompt_logprobs")
        await c.idle()


async def test_echo_returns_the_prompt_and_its_logprobs(cluster):
    async with cluster() as c:
        text = "a quick brown fox"
        whole = await c.stub.Complete(make_request(text, echo=True, max_tokens=4), timeout=patience(20))
        assert whole.prompt.text == text and not whole.prompt_logprobs
        token_ids = list(whole.prompt.token_ids)
        asked = make_request(token_ids, echo=True, max_tokens=4, prompt_logprobs=1)
        again = await c.stub.Complete(asked, timeout=patience(20))
        assert again.prompt.token_ids == token_ids and again.prompt.text.strip() == text
        assert len(again.prompt_logprobs) == len(token_ids) - 1


@pytest.mark.parametrize("prompt", [[("user", "a quick brown fox")], "a quick brown fox"], ids=["messages", "text"])
async def test_token_ids_of_a_prompt_alone(cluster, prompt):
    async with cluster() as c:
        asked = make_request(prompt, max_tokens=4)
        asked.echo_token_ids = True
        whole = await c.stub.Complete(asked, timeout=patience(20))
        asked = (
            pb.TokenizeRequest(text=asked.text)
            if isinstance(prompt, str)
            else pb.TokenizeRequest(messages=asked.messages)
        )
        tokenized = await c.stub.Tokenize(asked, timeout=patience(20))
        assert whole.prompt == pb.EchoedPrompt(token_ids=tokenized.token_ids)


async def test_a_resumed_answer_has_them_once(cluster):
    async with cluster() as c:
        asked = dict(request_id="r", seed=1, prompt_logprobs=0, echo=True, max_tokens=9)
        none_yet = await generate(c, **asked, resume_from=[0])
        assert len(none_yet[0].prompt_logprobs) == 299 and none_yet[0].HasField("prompt")
        some = await generate(c, **asked, resume_from=[3])
        assert not any(message.prompt_logprobs or message.HasField("prompt") for message in some)
        assert ids_of(some) == tokens_of(PROMPT, 9, 400)[3:]


async def test_the_next_worker_reads_them_too(cluster):
    async with cluster(num_prefill=2) as c:
        for worker in c.prefill:
            worker.failures["prefill"] = [(14, "DRAINING")]
        c.prefill[1].failures.clear()
        for _ in range(4):
            messages = await generate(c, prompt_logprobs=0, max_tokens=2)
            assert len(messages[0].prompt_logprobs) == 299


async def test_a_worker_that_gives_none_is_not_believed(cluster, monkeypatch):
    send_done = FakeWorker._send_done

    def forget(self, session, key, spec, *given) -> list[int]:
        spec.sampling.ClearField("prompt_logprobs")
        return send_done(self, session, key, spec, *given)

    monkeypatch.setattr(FakeWorker, "_send_done", forget)
    async with cluster(split="always") as c:
        (reader,), (writer,) = c.gateway.registry.prefill, c.gateway.registry.decode
        c.decode[0].hold("fetch")  # a prompt that is taken is a success
        for _ in range(2):
            error = await expect_refusal(generate(c, prompt_logprobs=0, max_tokens=2))
            assert error.reason == "DIVERGED"
        assert (reader.breaker.state, writer.breaker.state) == (BreakerState.OPEN, BreakerState.NEW)


@pytest.mark.parametrize(
    "field, asked",
    [
        ("sampling.prompt_logprobs", {"prompt_logprobs": 21}),
        ("sampling.prompt_logprobs", {"prompt_logprobs": 19, "limits": "strict"}),
        ("echo", {"echo": True, "prompt": [("user", "hi")]}),
    ],
    ids=["many", "strict", "messages"],
)
async def test_bad_ones_are_refused_by_name(cluster, field, asked):
    limits = asked.pop("limits", "normal")
    async with cluster(limits=limits) as c:
        error = await expect_refusal(generate(c, **{"max_tokens": 2, **asked}))
        assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", (field,))
