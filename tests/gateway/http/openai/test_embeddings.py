"""The vectors of /v1/embeddings."""

import pytest
from openai import BadRequestError, NotFoundError, RateLimitError

from baton.v1 import inference_pb2 as pb
from gateway.api.request_handler import RequestHandler
from gateway.http import app
from tests.support.pace import patience

PROMPT = list(range(20, 90))


async def test_embeddings_are_those_of_the_grpc_call(served):
    async with served() as (c, client):
        inputs = ["a quick brown fox", "a dog"]
        wanted = pb.EmbedRequest(inputs=[pb.EmbedInput(text=each) for each in inputs], dimensions=3)
        said = await c.stub.Embed(wanted, timeout=patience(20))
        vectors = [list(each.values) for each in said.embeddings]
        for encoding in ({}, {"encoding_format": "float"}):  # without, the client asks for base64
            whole = await client.embeddings.create(model="fake", input=inputs, dimensions=3, **encoding)
            assert [each.embedding for each in whole.data] == vectors
            assert [each.index for each in whole.data] == [0, 1]
            assert (whole.model, whole.usage.total_tokens) == ("fake", said.usage.prompt_tokens)
        one = await client.embeddings.create(model="fake", input=[20, 21, 22], extra_body={"pooling": "mean"})
        assert one.data[0].embedding == [3, 20, 22, pb.POOLING_MEAN]
        with pytest.raises(BadRequestError) as caught:
            await client.embeddings.create(model="fake", input=["a", ""])
        assert caught.value.param == "input[1].text"


async def test_many_texts_are_embedded_in_parts(served):
    """Clients that index documents send 512 or 1,000 at a time, as OpenAI lets them; they were refused beyond 128."""
    async with served() as (c, client):
        texts = [f"fox {n}" for n in range(300)]
        whole = await client.embeddings.create(model="fake", input=texts, dimensions=3)
        assert [each.index for each in whole.data] == [*range(300)]
        num_tokens = 0
        for begin in range(0, 300, 100):
            inputs = [pb.EmbedInput(text=each) for each in texts[begin : begin + 100]]
            said = await c.stub.Embed(pb.EmbedRequest(inputs=inputs, dimensions=3), timeout=patience(20))
            here = whole.data[begin : begin + 100]
            assert [each.embedding for each in here] == [list(each.values) for each in said.embeddings]
            num_tokens += said.usage.prompt_tokens
        assert whole.usage.prompt_tokens == num_tokens
        with pytest.raises(BadRequestError) as caught:
            await client.embeddings.create(model="fake", input=[*texts[:200], ""])
        assert caught.value.param == "input[200].text" and "input[200].text" in caught.value.message
        with pytest.raises(BadRequestError, match="2049 prompts, 1 to 2048"):
            await client.embeddings.create(model="fake", input=["a"] * 2049)


@pytest.mark.parametrize("limits, most", [("normal", 128), ("strict", 16)])
async def test_all_texts_are_checked_before_the_first_are_read(served, monkeypatch, limits, most):
    embed, calls = RequestHandler.embed, list[int]()

    async def counted(handler, request, context):
        calls.append(len(request.inputs))
        return await embed(handler, request, context)

    monkeypatch.setattr(RequestHandler, "embed", counted)
    async with served(limits=limits) as (c, client):
        texts = [f"fox {n}" for n in range(300)]
        for wrong, where in (
            ({"input": [*texts, ""]}, "input[300].text"),
            ({"input": [*([[20]] * 299), [20, 1_000_000]]}, "input[299].token_ids.ids[1]"),
            ({"input": texts, "dimensions": 5}, "dimensions"),
        ):
            with pytest.raises(BadRequestError) as caught:
                await client.embeddings.create(model="fake", **wrong)
            assert caught.value.param == where
        monkeypatch.setattr(app, "_MAX_VECTOR_BYTES", 20_000)
        with pytest.raises(BadRequestError, match="input: 300 vectors have over 20000 bytes"):
            await client.embeddings.create(model="fake", input=texts)
        with pytest.raises(NotFoundError, match="'other' is not served"):
            await client.embeddings.create(model="other", input=texts)
        assert not calls and c.gateway.handler.num_running == 0
        monkeypatch.undo()
        monkeypatch.setattr(RequestHandler, "embed", counted)
        assert len((await client.embeddings.create(model="fake", input=texts)).data) == 300
        assert calls == [most] * (300 // most) + [300 % most]


async def test_texts_beyond_a_quota_of_tokens_wait_until_it_has_some(served, tmp_path):
    """A client that came again paid for the first ones each time, and may never have had the last."""
    path = tmp_path / "quotas.toml"
    path.write_text("[default]\ntokens_per_s = 2000\nburst_tokens = 200\n")
    async with served(quotas=path) as (_, client):
        texts = [f"fox {n}" for n in range(300)]
        assert [each.index for each in (await client.embeddings.create(model="fake", input=texts)).data] == [
            *range(300)
        ]
        path.write_text("[default]\ntokens_per_s = 0.001\nburst_tokens = 200\n")
    async with served(quotas=path) as (_, client):
        with pytest.raises(RateLimitError, match="quota"):
            await client.embeddings.create(model="fake", input=texts)
