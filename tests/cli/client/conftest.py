"""A stand-in for the gateway of the commands that ask one."""

import time
from concurrent import futures

import grpc
import pytest

from baton.service.errors import InvalidRequest, to_status
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc


class StandIn(inference_pb2_grpc.InferenceServicer):
    """Keeps what it is asked; each choice is `Größe` in two messages, between which an endless request stays."""

    def __init__(self):
        self.requests, self.target = [], ""

    def Generate(self, request, context):
        self.requests.append(request)
        if request.stopping.HasField("max_tokens") and request.stopping.max_tokens == 0:
            error = InvalidRequest("stopping.max_tokens", "must be at least 1")
            context.set_trailing_metadata((("grpc-status-details-bin", to_status(error).SerializeToString()),))
            context.abort(error.code, error.message)
        last_choice = max(1, request.sampling.n) - 1
        for index in range(last_choice + 1):
            first = pb.GenerateResponse(index=index, text="Grö", token_ids=[1])
            if request.sampling.HasField("logprobs"):
                first.logprobs.add().chosen.logprob = -0.5
            if index == 0:
                first.seed, first.request_id = 7, "r"
            yield first
        said = [message.content for message in request.messages.messages]
        while said[-1:] == ["endless"] and context.is_active():
            time.sleep(0.01)
        for index in range(last_choice + 1):
            yield pb.GenerateResponse(index=index, text="ße", token_ids=[2, 3])
            last = pb.GenerateResponse(index=index, finish_reason=pb.FINISH_REASON_STOP)
            if index == last_choice:
                last.usage.prompt_tokens = 4
                last.timing.ttft_s = 0.5
            yield last


@pytest.fixture(scope="package")
def gateway():
    server, servicer = grpc.server(futures.ThreadPoolExecutor(2)), StandIn()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(0).wait()
