"""Every fault of a request is reported with the field's name, before anything is allocated."""

import math
import time

import grpc
import pytest

from baton.v1 import inference_pb2 as pb
from tests.support.client import make_request, read_error

PROMPT = [10, 20, 30]
CONTEXT = 1024
VOCAB = 1024


def bad(field: str, prompt=PROMPT, **fields):
    return pytest.param(field, make_request(prompt, **fields), id=f"{field}-{fields or prompt!r}"[:60])


NOT_NUMBERS = [
    bad(field, **{field: value})
    for field in (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    for value in (math.nan, math.inf, -math.inf)
]
BAD = [
    bad("input", None),
    bad("text", ""),
    bad("token_ids", []),
    bad("token_ids", list(range(5)) * 300),
    bad("text", "zebra " * 2000),
    bad("token_ids", [1, VOCAB]),
    bad("token_ids", [2**32 - 1]),
    bad("max_tokens", max_tokens=0),
    bad("max_tokens", max_tokens=CONTEXT),
    bad("max_tokens", max_tokens=2**32 - 1),
    bad("min_tokens", min_tokens=9, max_tokens=8),
    bad("temperature", temperature=-0.1),
    bad("top_p", top_p=0.0),
    bad("top_p", top_p=1.5),
    bad("top_p", top_p=-0.5),
    bad("min_p", min_p=-0.1),
    bad("min_p", min_p=1.1),
    bad("repetition_penalty", repetition_penalty=0.0),
    bad("repetition_penalty", repetition_penalty=-1.0),
    bad("n", n=0),
    bad("n", n=9),
    bad("logprobs", logprobs=21),
    bad("stop", stop=["x"] * 17),
    bad("stop", stop=["a", ""]),
    bad("stop", stop=["x" * 257]),
    bad("stop", stop=["é" * 129]),  # 258 bytes
    bad("stop_token_ids", stop_token_ids=[VOCAB]),
    bad("logit_bias", logit_bias=dict.fromkeys(range(1025), 1.0)),
    bad("logit_bias", logit_bias={VOCAB: 1.0}),
    bad("logit_bias", logit_bias={5: math.nan}),
    bad("logit_bias", logit_bias={5: math.inf}),
    bad("role", [("", "hello")]),
    bad("role", [("wizard", "hello")]),
    bad("request_id", request_id="no spaces"),
    bad("request_id", request_id="x" * 65),
    bad("request_id", request_id="ünicode"),
    *NOT_NUMBERS,
]


@pytest.mark.parametrize("field, request_", BAD)
@pytest.mark.parametrize("method", ["Generate", "Complete"])
def test_invalid_argument_names_the_field(client, method, field, request_):
    with pytest.raises(grpc.RpcError) as caught:
        answer = getattr(client.stub, method)(request_, timeout=20)
        list(answer)
    refused = read_error(caught.value)
    assert refused.code == grpc.StatusCode.INVALID_ARGUMENT, refused
    assert refused.fields, refused
    assert field in refused.fields[0].replace("[", ".").split("."), refused
    assert len(refused.message) < 300, "the message repeats the input"


def test_the_largest_that_is_allowed(client):
    """The borders themselves are no errors."""
    borders = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 1.0,
        "n": 8,
        "logprobs": 20,
        "stop": ["é" * 128] + ["x" * 256] * 15,
        "logit_bias": dict.fromkeys(range(VOCAB), 0.0),
    }
    reply = client.generate(PROMPT, max_tokens=2, min_tokens=2, request_id="A-z_09" + "x" * 58, **borders)
    assert len(reply.choices) == 8 and len(reply.choices[0].logprobs[0][2]) == 20
    last = client.generate([7] * (CONTEXT - 1), max_tokens=1, temperature=0.0)
    assert last.usage.prompt_tokens == CONTEXT - 1 and last.usage.output_tokens == 1


def test_nothing_was_allocated(client, probes):
    """A refused request never reaches a worker: their blocks are as before."""
    before = {name: probe.wait_idle() for name, probe in probes.items()}
    for request in (make_request(list(range(900)) + [VOCAB]), make_request(PROMPT * 200, top_p=2.0)):
        with pytest.raises(grpc.RpcError):
            list(client.stub.Generate(request, timeout=20))
    assert {name: probe.wait_idle() for name, probe in probes.items()} == before


def test_over_a_mebibyte(client):
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stub.Generate(make_request("a" * (1 << 20)), timeout=20))
    refused = read_error(caught.value)
    assert refused.code == grpc.StatusCode.INVALID_ARGUMENT and refused.fields, refused


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize", "GetModelInfo"])
def test_unknown_model(client, method):
    request = {
        "Generate": pb.GenerateRequest(model="no-such-model", text="x"),
        "Tokenize": pb.TokenizeRequest(model="no-such-model", text="x"),
        "Detokenize": pb.DetokenizeRequest(model="no-such-model", token_ids=[5]),
        "GetModelInfo": pb.GetModelInfoRequest(model="no-such-model"),
    }[method]
    with pytest.raises(grpc.RpcError) as caught:
        answer = getattr(client.stub, method)(request, timeout=20)
        list(answer)
    assert read_error(caught.value).code == grpc.StatusCode.NOT_FOUND


def test_detokenize_out_of_range(client):
    with pytest.raises(grpc.RpcError) as caught:
        client.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5, VOCAB]), timeout=20)
    refused = read_error(caught.value)
    assert refused.code == grpc.StatusCode.INVALID_ARGUMENT and "token_ids" in refused.fields[0]


def test_request_id_in_use(client, prompts, slow):
    running = client.stream(prompts(20), request_id="mine", max_tokens=500, temperature=0.0, ignore_eos=True)
    next(running)
    with pytest.raises(grpc.RpcError) as caught:
        client.generate(prompts(20), request_id="mine", max_tokens=2)
    assert read_error(caught.value).code == grpc.StatusCode.ALREADY_EXISTS
    running.cancel()
    deadline = time.monotonic() + 10
    while True:  # free again once the cancelled one is gone
        try:
            assert client.generate(prompts(20), request_id="mine", max_tokens=2).request_id == "mine"
            return
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.ALREADY_EXISTS and time.monotonic() < deadline
            time.sleep(0.05)


def test_a_deadline_already_past(client, prompts, probes):
    before = {name: probe.wait_idle() for name, probe in probes.items()}
    for timeout in (0.0, 1e-6):
        with pytest.raises(grpc.RpcError) as caught:
            client.generate(prompts(200), timeout=timeout, max_tokens=4)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert {name: probe.wait_idle() for name, probe in probes.items()} == before


def test_a_deadline_in_mid_stream(client, prompts, probes, slow):
    with pytest.raises(grpc.RpcError) as caught:
        client.generate(prompts(20), timeout=0.3, max_tokens=900, n=4, temperature=1.0, ignore_eos=True)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    for probe in probes.values():
        probe.wait_idle()
