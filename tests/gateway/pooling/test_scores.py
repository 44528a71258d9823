"""Scores through the gateway between FakeWorkers: each document is a conversation that asks for yes or no."""

import math

import pytest

from baton.v1 import inference_pb2 as pb
from gateway.request.scoring import score_of
from tests.gateway.calls import expect_refusal
from tests.support.pace import patience


@pytest.fixture
def labelled(monkeypatch):
    """Words of which the tests' tokenizer has a token each."""
    monkeypatch.setattr("gateway.api.request_handler.LABELS", ("y", "n"))


def score_request(*documents: str, query: str = "which?", **fields) -> pb.ScoreRequest:
    return pb.ScoreRequest(query=query, documents=documents, **fields)


async def test_each_document_is_a_conversation_in_the_model_s_words(cluster, labelled):
    async with cluster() as c:
        response = await c.stub.Score(score_request("a fox", "a dog " * 9, instruction="find it"), timeout=patience(20))
        specs = [message.spec for kind, message in c.prefill[0].commands if kind == "prefill"]
        assert len(specs) == 2 and all(len(spec.pooling.label_token_ids) == 2 for spec in specs)
        assert sum(len(spec.token_ids) for spec in specs) == response.usage.prompt_tokens
        for spec, document in zip(specs, ("a fox", "a dog " * 9), strict=True):
            text = (await c.stub.Detokenize(pb.DetokenizeRequest(token_ids=spec.token_ids), timeout=patience(20))).text
            assert f"<Instruct>: find it\n<Query>: which?\n<Document>: {document}".strip() in text
        numbers = [score_of([-len(spec.token_ids) / 1000, -1.0]) for spec in specs]
        assert list(response.scores) == pytest.approx(numbers)
        assert not c.decode[0].kinds() and response.request_id
        await c.idle()


@pytest.mark.parametrize(
    "field, request_",
    [
        ("query", score_request("a", query="")),
        ("query", score_request(*"a" * 128, query="which " * 10_000)),
        ("documents", score_request()),
        ("documents", score_request(*["a"] * 129)),
        ("documents", score_request("a" * (1 << 20))),
        ("documents[1]", score_request("a", "")),
        ("documents[1]", score_request("a", "a b " * 4000)),
        ("request_id", score_request("a", request_id="a b")),
        ("slo_class", score_request("a", slo_class="none such")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_ones_are_refused_by_name(cluster, labelled, field, request_):
    async with cluster() as c:
        error = await expect_refusal(c.stub.Score(request_, timeout=patience(20)))
        assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", (field,))
        assert len(error.message) < 300 and not c.prefill[0].kinds()


async def test_a_model_without_the_words_cannot_judge(cluster, monkeypatch):
    monkeypatch.setattr("gateway.api.request_handler.LABELS", ("y", "certainly not"))
    async with cluster() as c:
        error = await expect_refusal(c.stub.Score(score_request("a"), timeout=patience(20)))
        assert error.code.name == "FAILED_PRECONDITION" and "certainly not" in error.message


def test_scores_are_between_0_and_1():
    assert score_of([-1.0, -1.0]) == 0.5 and score_of([0.0, -math.inf]) == 1.0
    assert 0 <= score_of([-1e30, 0.0]) < 1e-200 and score_of([math.log(0.6), math.log(0.2)]) == pytest.approx(0.75)
