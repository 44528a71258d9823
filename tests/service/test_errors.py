"""Errors over a real connection: what one process aborts with is what the other reads."""

import base64
import json
import re
from pathlib import Path

import grpc
import pytest

from baton.client import CallError
from baton.client.errors import read_call_error
from baton.service import errors
from baton.service.net.client import open_channel
from baton.service.net.server import bind, make_server
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.client import read_error
from tests.support.pace import patience

USER_PAGE = Path(__file__).resolve().parents[2] / "docs" / "user.md"


class Refusing(inference_pb2_grpc.InferenceServicer):
    def __init__(self, error):
        self.error = error

    async def Tokenize(self, request, context):
        await errors.abort(context, self.error)

    async def Generate(self, request, context):
        yield pb.GenerateResponse(text="first")
        await errors.abort(context, self.error)


CASES = [
    errors.InvalidRequest("sampling.top_p", "must be in (0, 1]"),
    errors.NotFound("model 'x' is not served here"),
    errors.AlreadyExists("request_id 'a' is in use"),
    errors.Overloaded("no decode credit", 0.25, reason="KV_FULL"),
    errors.Unavailable("no worker", retry_after_s=1.5, reason="NO_WORKER"),
    errors.Unavailable("draining"),
    errors.DeadlineExceeded("too late"),
    errors.Cancelled("client went away"),
    errors.FailedPrecondition("layouts differ"),
    errors.DataLoss("digest mismatch ü"),
    errors.Internal("a bug"),
]


async def call(error, streaming: bool) -> grpc.RpcError:
    server = make_server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Refusing(error), server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.RpcError) as raised:
                if streaming:
                    async for _ in stub.Generate(pb.GenerateRequest()):
                        pass
                else:
                    await stub.Tokenize(pb.TokenizeRequest())
            return raised.value
    finally:
        await server.stop(0)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("error", CASES, ids=lambda error: f"{type(error).__name__}-{error.reason}")
async def test_round_trip(error, streaming):
    got = read_call_error(await call(error, streaming))
    assert (got.code(), got.reason, got.message, got.field) == (error.code, error.reason, error.message, error.field)
    assert got.retry_after_s == error.retry_after_s


async def test_an_error_says_which_request_it_is_of():
    error = errors.Overloaded("full", 0.25)
    assert read_call_error(await call(error, streaming=False)).request_id == ""
    error.request_id = "a" * 64
    got = read_call_error(await call(error, streaming=True))
    assert (got.request_id, got.reason, got.retry_after_s) == ("a" * 64, "OVERLOADED", 0.25)


async def test_public_details_are_google_rpc():
    refused = read_error(await call(errors.InvalidRequest("n", "must be at most 8"), streaming=False))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.fields == ("n",) and refused.reason == "INVALID_REQUEST"
    assert refused.message == "n: must be at most 8"
    refused = read_error(await call(errors.Overloaded("full", 0.1), streaming=True))
    assert refused.retry_after_s == pytest.approx(0.1)


async def test_retries_of_grpc_itself_come_back_when_they_are_asked_to():
    """They read no RetryInfo: by their own policy they would wait for minutes."""
    refusals = [errors.Overloaded("full", 0.01), errors.Unavailable("no worker", 0.02, reason="NO_WORKER")]
    assert (await asked_with_retries(refusals, "900s")).token_ids == [1] and not refusals


async def test_retries_of_grpc_itself_leave_what_they_are_not_asked_to_send_again():
    refusals = [errors.from_code(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much metadata") for _ in range(2)]
    with pytest.raises(grpc.aio.AioRpcError, match="too much metadata"):
        await asked_with_retries(refusals, "0.01s")
    assert len(refusals) == 1


async def asked_with_retries(refusals: list[errors.BatonError], backoff: str) -> pb.TokenizeResponse:
    """Ask one who first answers with these, by the service config that the page for users has."""
    (drawn,) = re.findall("<!-- retries -->\n```\n(.*?)\n```\n<!-- end -->", USER_PAGE.read_text(), re.DOTALL)
    config = json.loads(drawn)
    config["methodConfig"][0]["retryPolicy"] |= {"initialBackoff": backoff, "maxBackoff": backoff}

    class Busy(inference_pb2_grpc.InferenceServicer):
        async def Tokenize(self, request, context):
            if refusals:
                await errors.abort(context, refusals.pop())
            return pb.TokenizeResponse(token_ids=[1])

    server = make_server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Busy(), server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        options = [("grpc.service_config", json.dumps(config))]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            asking = inference_pb2_grpc.InferenceStub(channel).Tokenize(pb.TokenizeRequest(), timeout=patience(10))
            return await asking
    finally:
        await server.stop(0)


async def test_long_message_still_arrives():
    got = read_call_error(await call(errors.Internal("ü" * 5000), streaming=False))
    assert got.code() is grpc.StatusCode.INTERNAL and got.message == "ü" * 500


@pytest.mark.parametrize("character", ["a", "%", "ü", "語", "🙂", "\ud800"])
def test_any_message_fits_into_metadata(character):
    """Beyond 8 KiB clients of gRPC take some errors for RESOURCE_EXHAUSTED: 1,000 characters beyond ASCII were 9 to 23
    KB."""
    error = errors.InvalidRequest("f" * 100, character * 5000)
    error.request_id = "a" * 64
    status = errors.to_status(error)
    percent_encoded = 3 * len(status.message.encode())
    assert status.message and percent_encoded + len(base64.b64encode(status.SerializeToString())) < 7 << 10


async def test_transport_error_keeps_its_code():
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.RpcError) as raised:
            await inference_pb2_grpc.InferenceStub(channel).Tokenize(pb.TokenizeRequest(), timeout=5)
    got = read_call_error(raised.value)
    assert got.code() is grpc.StatusCode.UNAVAILABLE and got.reason == "" and got.message


@pytest.mark.parametrize(
    "code, kind", [(8, errors.Overloaded), (4, errors.DeadlineExceeded), (15, errors.DataLoss), (0, errors.Internal)]
)
def test_from_number(code, kind):
    assert type(errors.from_code(code, "x")) is kind


def test_unmapped_code_is_kept():
    got = errors.from_code(grpc.StatusCode.ABORTED, "poison")
    assert got.code is grpc.StatusCode.ABORTED and got.reason == "ABORTED"


@pytest.mark.parametrize("details", [b"\xff\xff\xff", b"\x1a\x05\x0a\x00\x12\x01\xff", b"\x1a\x02\x08\x01", b""])
def test_foreign_details_are_no_trust(details):
    error = CallError(grpc.StatusCode.INTERNAL, "x", (("grpc-status-details-bin", details),))
    assert (error.reason, error.field, error.retry_after_s, error.request_id) == ("", None, None, "")
