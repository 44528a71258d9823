"""Serve baton.v1.Inference. The server's guard turns exceptions into a gRPC status with google.rpc details."""

from collections.abc import Awaitable

import grpc

from baton.service.observe.telemetry import parse_traceparent
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from gateway.api.owned_request import OwnedRequest
from gateway.api.request_handler import CallContext, RequestHandler

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name


def _owned(raw: bytes) -> OwnedRequest:
    """Return the message as one that its handler can take."""
    return OwnedRequest(pb.GenerateRequest.FromString(raw))


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The calls of clients, each served by the RequestHandler."""

    def __init__(self, handler: RequestHandler):
        self._handler = handler

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the calls with a server."""
        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.Generate, _owned, pb.GenerateResponse.SerializeToString
            ),
            "Complete": grpc.unary_unary_rpc_method_handler(
                self.Complete, _owned, pb.CompleteResponse.SerializeToString
            ),
        }
        # These replace the generated handlers: gRPC 1.71 asks generic handlers alone, in the order of registration.
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)
        server.add_registered_method_handlers(SERVICE_NAME, handlers)

    def Generate(self, owned: OwnedRequest, context) -> Awaitable[None]:
        """Stream an answer."""
        # This is no coroutine around the handler's, which would cost a third of a KB for each open stream.
        # Nor is it a generator, whose `finally` would run when it is collected, and not when the client disconnects.
        return self._handler.generate(owned, _call(context), context.write)

    async def Complete(self, owned: OwnedRequest, context) -> pb.CompleteResponse:
        """Return an answer in one message."""
        return await self._handler.complete(owned, _call(context))

    async def Tokenize(self, request: pb.TokenizeRequest, context) -> pb.TokenizeResponse:
        """Return the token ids of a text or a conversation."""
        return await self._handler.tokenize(request, _call(context))

    async def Detokenize(self, request: pb.DetokenizeRequest, context) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        return await self._handler.detokenize(request, _call(context))

    async def Embed(self, request: pb.EmbedRequest, context) -> pb.EmbedResponse:
        """Return a vector for each input."""
        return await self._handler.embed(request, _call(context))

    async def Score(self, request: pb.ScoreRequest, context) -> pb.ScoreResponse:
        """Return how well each document answers the query."""
        return await self._handler.score(request, _call(context))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context) -> pb.GetModelInfoResponse:
        """Return the description of one model."""
        return await self._handler.model_info(request)

    async def ListModels(self, request: pb.ListModelsRequest, context) -> pb.ListModelsResponse:
        """Return the descriptions of all models."""
        return await self._handler.models()


def _call(context: grpc.aio.ServicerContext) -> CallContext:
    traceparent = next((value for key, value in context.invocation_metadata() or () if key == "traceparent"), None)
    parent = parse_traceparent(traceparent) if isinstance(traceparent, str) else None
    return CallContext(context.time_remaining(), parent)
