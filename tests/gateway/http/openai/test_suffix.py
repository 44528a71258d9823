"""The suffix of a completion, by HTTP and gRPC: part of the prompt, where the model's tokenizer has tokens for it."""

import pytest
from openai import BadRequestError

from baton.v1 import inference_pb2 as pb
from gateway.text import infilling
from tests.gateway.calls import expect_refusal
from tests.support.client import make_request


@pytest.fixture
def infilled(monkeypatch):
    """The tokenizer of tests has tokens for it."""
    form = infilling._Form(
        ("<|user|>", infilling._PREFIX, "<|system|>", infilling._SUFFIX, "<|end|>"), ("<|assistant|>",)
    )
    monkeypatch.setattr(infilling, "_FORMS", (form,))


async def test_a_suffix_is_part_of_the_prompt(served, infilled):
    async with served() as (c, client):
        ask = {"model": "fake", "max_tokens": 3}
        answer = await client.completions.create(prompt="a fox", suffix=" and a <|user|>", **ask)
        assert (await client.completions.create(prompt="", suffix="a", **ask)).choices[0].finish_reason == "length"
        first, second = [message.spec for kind, message in c.prefill[0].commands if kind == "prefill"]
        ids = list(first.token_ids)
        assert (ids[0], ids[-1], ids.count(1), ids.count(3)) == (1, 4, 1, 1) and answer.usage.prompt_tokens == len(ids)
        assert {0, 2, 4} == set(first.stop_token_ids) and list(second.token_ids)[:2] == [1, 3]
        assert await client.completions.create(prompt="a fox", suffix="", **ask), "it is as if it were left out"


async def test_a_model_without_tokens_for_it_refuses_a_suffix(served):
    async with served() as (_, client):
        with pytest.raises(BadRequestError, match="no control tokens for it") as caught:
            await client.completions.create(model="fake", prompt="a", suffix="b")
        assert caught.value.param == "suffix"


@pytest.mark.parametrize("prompt, fields", [([20], {}), ([("user", "a")], {}), ("a", {"echo": True})])
async def test_what_a_suffix_does_not_go_with(served, infilled, prompt, fields):
    async with served() as (c, _):
        request: pb.GenerateRequest = make_request(prompt, max_tokens=1, **fields)
        request.suffix = "b"
        error = await expect_refusal(c.stub.Complete(request, timeout=20))
        assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", ("suffix",))


async def test_two_texts_that_cannot_fit_are_refused_at_once(served, infilled, monkeypatch):
    async with served() as (c, _):
        monkeypatch.setattr(
            c.pipeline.text._tokenizer, "encode_plain", lambda *_, **__: pytest.fail("it was tokenized")
        )
        request = make_request("a" * 400_000, max_tokens=1)
        request.suffix = "b" * 400_000
        error = await expect_refusal(c.stub.Complete(request, timeout=20))
        assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
