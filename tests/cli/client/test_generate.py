"""`baton generate` against a stand-in for the gateway: what is asked, what is printed, how it fails."""

import json
import subprocess
import sys
from concurrent import futures

import grpc
import pytest

from baton.service.errors import InvalidRequest, to_status
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.process import ROOT


class Gateway(inference_pb2_grpc.InferenceServicer):
    def __init__(self):
        self.requests = []

    def Generate(self, request, context):
        self.requests.append(request)
        if request.stopping.HasField("max_tokens") and request.stopping.max_tokens == 0:
            error = InvalidRequest("stopping.max_tokens", "must be at least 1")
            context.set_trailing_metadata((("grpc-status-details-bin", to_status(error).SerializeToString()),))
            context.abort(error.code, error.message)
        yield pb.GenerateResponse(text="Grö", token_ids=[1], seed=7, request_id="r")
        yield pb.GenerateResponse(text="ße", token_ids=[2, 3])
        last = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP)
        last.usage.prompt_tokens = 4
        last.timing.ttft_s = 0.5
        yield last


@pytest.fixture(scope="module")
def gateway():
    server, servicer = grpc.server(futures.ThreadPoolExecutor(2)), Gateway()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(0).wait()


def run(*argv: str) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "baton.cli", "generate", *argv]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_text_as_it_comes(gateway):
    done = run("a prompt", "--target", gateway.target)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Größe\n", "")
    request = gateway.requests[-1]
    assert request.text == "a prompt"
    assert not request.HasField("sampling") and not request.HasField("stopping"), "what is not given is not sent"


def test_json(gateway):
    argv = ["a prompt", "--target", gateway.target, "--json"]
    done = run(*argv, "--max-tokens", "9", "--temperature", "0", "--seed", "18446744073709551615")
    answer = json.loads(done.stdout)
    assert answer["text"] == "Größe" and answer["token_ids"] == [1, 2, 3] and answer["finish_reason"] == "stop"
    assert answer["seed"] == 7 and answer["request_id"] == "r"
    assert answer["usage"]["prompt_tokens"] == 4 and answer["timing"]["ttft_s"] == 0.5
    request = gateway.requests[-1]
    assert request.stopping.max_tokens == 9 and request.sampling.seed == 2**64 - 1
    assert request.sampling.HasField("temperature") and request.sampling.temperature == 0


def test_refused(gateway):
    done = run("x", "--target", gateway.target, "--max-tokens", "0")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.count("\n") == 1 and "INVALID_ARGUMENT" in done.stderr and "stopping.max_tokens" in done.stderr


def test_nobody_there():
    done = run("x", "--target", "127.0.0.1:9")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "127.0.0.1:9" in done.stderr


@pytest.mark.parametrize(
    "options, word",
    [
        (["--max-tokens", "-1"], "--max-tokens"),
        (["--max-tokens", "many"], "--max-tokens"),
        (["--seed", str(2**64)], "--seed"),
        (["--temp", "1"], "--temp"),
    ],
)
def test_wrong_use(options, word):
    done = run("x", *options)
    assert done.returncode == 2 and word in done.stderr
