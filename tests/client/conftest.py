"""Gateways of a few lines, which break off where a test says."""

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager

import grpc
import pytest

from baton.service.errors import BatonError, to_status
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc

NUM_TOKENS = 6


def fail(context: grpc.ServicerContext, error: BatonError | None) -> None:
    """None: as gRPC itself ends calls while a server shuts down."""
    if error is None:
        context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
    status = to_status(error)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(error.code, status.message)


class ScriptedGateway(inference_pb2_grpc.InferenceServicer):
    """Answers each choice with tokens 0 to 5; `script` says of each call how it ends: a number of messages and the
    error behind them, None: whole."""

    def __init__(self):
        self.script: list[tuple[int, BatonError] | None] = []
        self.requests, self.metadata, self.remaining_s = [], [], []
        self.target = ""

    def _note(self, request, context) -> tuple[int, BatonError] | None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining_s.append(context.time_remaining())
        return self.script.pop(0) if self.script else None

    def Generate(self, request, context):
        broken = self._note(request, context)
        for number, message in enumerate(answer_of(request)):
            if broken and number == broken[0]:
                fail(context, broken[1])
            yield message

    def Complete(self, request, context):
        if broken := self._note(request, context):
            fail(context, broken[1])
        return pb.CompleteResponse(choices=[pb.Choice(text="".join(each.text for each in answer_of(request)))])

    def Tokenize(self, request, context):
        if broken := self._note(request, context):
            fail(context, broken[1])
        return pb.TokenizeResponse(token_ids=range(len(request.text or request.messages.messages)))

    def Detokenize(self, request, context):
        tokens = map(str, request.token_ids) if request.return_tokens else ()
        text = " ".join(map(str, request.token_ids))
        return pb.DetokenizeResponse(text=text, tokens=(pb.TokenText(text=each.encode()) for each in tokens))

    def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(name="demo")

    def ListModels(self, request, context):
        return pb.ListModelsResponse(models=[self.GetModelInfo(request, context)])


def answer_of(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """As a gateway answers: choices by turns, what is of all of it first, usage last, what is received not again."""
    num_choices = request.sampling.n or 1
    received = list(request.resume_from) or [0] * num_choices
    messages = []
    for token in range(NUM_TOKENS):
        for index in range(num_choices):
            if token < received[index] and token != NUM_TOKENS - 1:
                continue
            is_new = token >= received[index]
            message = pb.GenerateResponse(index=index, text=f"{index}.{token} " if is_new else "")
            message.token_ids.extend([token] if is_new else [])
            if token == NUM_TOKENS - 1:
                message.finish_reason = pb.FINISH_REASON_LENGTH
            messages.append(message)
    messages[0].seed, messages[0].request_id = request.sampling.seed, request.request_id
    messages[0].prompt_tokens = 1
    messages[-1].usage.output_tokens = NUM_TOKENS * num_choices
    messages[-1].timing.ttft_s = 0.5
    return messages


@contextmanager
def serving(
    gateway: ScriptedGateway, tls: grpc.ServerCredentials | None = None, at: str = "127.0.0.1:0"
) -> Iterator[ScriptedGateway]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
    port = server.add_secure_port(at, tls) if tls else server.add_insecure_port(at)
    gateway.target = f"{at.rpartition(':')[0]}:{port}"
    server.start()
    try:
        yield gateway
    finally:
        server.stop(0).wait()


@pytest.fixture
def gateways() -> Iterator[Callable[[int], list[ScriptedGateway]]]:
    """Call it with how many."""
    with ExitStack() as exits:
        yield lambda num: [exits.enter_context(serving(ScriptedGateway())) for _ in range(num)]
