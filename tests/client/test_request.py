"""Requests from prompts and keywords: what is given is sent, what does not fit is named."""

import pytest

from baton.client import (
    AsyncClient,
    Client,
    EmbedOptions,
    GenerateOptions,
    ScoreOptions,
    make_embed_request,
    make_request,
)
from baton.client.request import make_score_request
from baton.v1 import inference_pb2 as pb


def test_every_option_of_the_contract_is_a_keyword():
    fields = set()
    for message in (pb.GenerateRequest, pb.Sampling, pb.Stopping):
        fields |= set(message.DESCRIPTOR.fields_by_name)
    inputs = {field.name for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["input"].fields}
    assert set(GenerateOptions.__annotations__) == fields - inputs - {"sampling", "stopping", "resume_from"}


def test_every_option_of_an_embedding_is_a_keyword():
    assert set(EmbedOptions.__annotations__) == set(pb.EmbedRequest.DESCRIPTOR.fields_by_name) - {"inputs"}
    request = make_embed_request(["a", [4, 5]], {"pooling": pb.POOLING_MEAN, "normalize": False, "dimensions": 8})
    assert [each.WhichOneof("input") for each in request.inputs] == ["text", "token_ids"]
    assert (request.pooling, request.normalize, request.dimensions) == (pb.POOLING_MEAN, False, 8)


@pytest.mark.parametrize("inputs, options, says", [
    ("a text", {}, "inputs: give a list"), (["a", [-1]], {}, r"inputs\[1\]"), (["a"], {"dimension": 8}, "dimension: there is"),
    (["a"], {"dimensions": -1}, "dimensions"), (["a", b"b"], {}, r"inputs\[1\]: give a text, not bytes"),
])  # fmt: skip
def test_what_does_not_fit_an_embedding_is_named(inputs, options, says):
    with pytest.raises(ValueError, match=says):
        make_embed_request(inputs, options)


def test_every_option_of_a_score_is_a_keyword():
    fields = set(pb.ScoreRequest.DESCRIPTOR.fields_by_name)
    assert set(ScoreOptions.__annotations__) == fields - {"query", "documents"}
    request = make_score_request("q", ["a", "b"], {"instruction": "find it"})
    assert (request.query, list(request.documents), request.instruction) == ("q", ["a", "b"], "find it")
    for documents, options, says in (("a", {}, "documents: give a list"), (["a"], {"top_n": 1}, "top_n: there is")):
        with pytest.raises(ValueError, match=says):
            make_score_request("q", documents, options)


def test_messages_have_what_the_contract_has():
    given = {"role": "tool", "content": "sunny", "tool_call_id": "c", "name": "weather"}
    assert make_request([given]).messages.messages[0] == pb.Message(**given)


def test_options_are_where_the_contract_has_them():
    request = make_request(
        "a", {"temperature": 0.0, "top_k": 3, "stop": ["x"], "max_tokens": 4, "logit_bias": {1: 2.0}, "priority": 0}
    )
    assert request.text == "a" and request.HasField("priority") and request.sampling.HasField("temperature")
    assert request.sampling.top_k == 3 and request.sampling.logit_bias[1] == 2.0
    assert request.stopping.stop == ["x"] and request.stopping.max_tokens == 4
    assert not make_request("a").HasField("sampling"), "what is not given is not sent"


@pytest.mark.parametrize("prompt", [
    [{"role": "user", "content": "x"}],
    [pb.Message(role="user", content="x")],
    pb.Messages(messages=[pb.Message(role="user", content="x")]),
])  # fmt: skip
def test_messages_may_be_dicts_or_protos(prompt):
    (message,) = make_request(prompt).messages.messages
    assert (message.role, message.content) == ("user", "x")


def test_token_ids():
    assert make_request((5, 6)).token_ids.ids == [5, 6]
    assert make_request([]).WhichOneof("input") == "token_ids", "for the gateway to refuse"


@pytest.mark.parametrize("prompt, options, says", [
    ("a", {"max_tokens": -1}, "max_tokens"),
    ("a", {"seed": 2**64}, "seed"),
    ("a", {"temperature": "hot"}, "temperature"),
    ("a", {"stop": "END"}, "stop: give a list"),
    ("a", {"temprature": 1.0}, "temprature: there is no such option"),
    ("a", {"sampling": pb.Sampling()}, "sampling"),
    ([-1], {}, "token_ids"),
    ([{"role": "user", "contents": "x"}], {}, r"messages\[0\]"),
    ([{"role": "user"}, "x"], {}, r"messages\[1\]"),
    ({"role": "user", "content": "x"}, {}, "messages: give a list"),
    (pb.Message(role="user", content="x"), {}, "messages: give a list"),
    (b"Hello", {}, "token_ids: give a text, not bytes"),
    ("a", {"stop_token_ids": b"END"}, "stop_token_ids: give a list"),
])  # fmt: skip
def test_what_does_not_fit_is_named(prompt, options, says):
    with pytest.raises(ValueError, match=says):
        make_request(prompt, options)


async def test_a_chat_is_messages():
    """A text, or token ids, went past the chat template."""
    with Client("a:1") as client, pytest.raises(ValueError, match="messages: give a list"):
        client.chat("Hello")
    async with AsyncClient("a:1") as client:
        with pytest.raises(ValueError, match=r"messages\[0\]"):
            await client.chat([5, 6])


@pytest.mark.parametrize("target", ["", " , ", []])
def test_a_client_without_an_address_is_refused(target):
    with pytest.raises(ValueError, match="host:port"):
        Client(target)


def test_half_a_certificate():
    with pytest.raises(ValueError, match="go together"):
        Client("a:1", tls_ca="ca.pem", tls_cert="c.pem")
