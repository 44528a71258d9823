"""baton.v1.Inference. Every end that is not an answer is a gRPC status with google.rpc details."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc

from baton.service.clock import now
from baton.service.errors import BatonError, DeadlineExceeded, Internal, Unavailable, abort
from baton.service.logs import fields
from baton.service.observe.telemetry import TraceContext, new_context, parse_traceparent
from baton.service.security import guard
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from gateway.answer.answer import Emit
from gateway.config.settings import GatewaySettings
from gateway.observe import request_trace
from gateway.orchestration.pipeline import Pipeline
from gateway.request.request_record import RequestRecord
from gateway.request.timing import Stamps
from gateway.request.validation import check, check_model, check_size

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name

log = logging.getLogger(__name__)


def _boxed(raw: bytes) -> list[pb.GenerateRequest]:
    """Return the message in a list, from which it can be taken: gRPC keeps a method's argument until its stream has
    ended."""
    return [pb.GenerateRequest.FromString(raw)]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The calls of clients."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: GatewaySettings,
        on_begin: Callable[[RequestRecord], None],
        on_end: Callable[[RequestRecord, BaseException | None], None],
        hold: Callable[[BatonError], Awaitable[None]],
    ):
        """`on_begin(record)` and `on_end(record, error)` are called once each a request, however it ends. `hold(error)`
        waits until the error may be sent."""
        self.is_draining = False
        self.num_running = 0
        self._pipeline, self._settings = pipeline, settings
        self._on_begin, self._on_end, self._hold = on_begin, on_end, hold

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the calls with a server."""
        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.Generate, _boxed, pb.GenerateResponse.SerializeToString
            ),
            "Complete": grpc.unary_unary_rpc_method_handler(
                self.Complete, _boxed, pb.CompleteResponse.SerializeToString
            ),
        }
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)
        server.add_registered_method_handlers(SERVICE_NAME, handlers)  # in place of those

    async def Generate(self, box: list[pb.GenerateRequest], context) -> None:
        """Stream an answer."""
        # Not a generator: its `finally` would run whenever it is collected, this one runs when the client goes.
        await self._answer(box, context, context.write)

    async def Complete(self, box: list[pb.GenerateRequest], context) -> pb.CompleteResponse:
        """Return an answer in one message."""
        response = pb.CompleteResponse()

        async def gather(message: pb.GenerateResponse) -> None:
            _add(response, message)

        await self._answer(box, context, gather)
        return response

    async def Tokenize(self, request: pb.TokenizeRequest, context) -> pb.TokenizeResponse:
        """Return the token ids of a text or a conversation."""

        async def tokenize() -> pb.TokenizeResponse:
            check_size(request)
            model = self._pipeline.registry.model
            check_model(request.model, model)
            whose, until = guard.tenant(), self._deadline(context, now())
            token_ids = await self._pipeline.tokenize(request, model, whose, until)
            return pb.TokenizeResponse(token_ids=token_ids)

        return await self._answered(tokenize, context)

    async def Detokenize(self, request: pb.DetokenizeRequest, context) -> pb.DetokenizeResponse:
        """Return the text of token ids."""

        async def detokenize() -> pb.DetokenizeResponse:
            check_size(request)
            model = self._pipeline.registry.model
            check_model(request.model, model)
            whose, until = guard.tenant(), self._deadline(context, now())
            text = await self._pipeline.detokenize(request.token_ids, model, whose, until)
            return pb.DetokenizeResponse(text=text)

        return await self._answered(detokenize, context)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context) -> pb.GetModelInfoResponse:
        """Return what is known of the served model."""

        async def info() -> pb.GetModelInfoResponse:
            registry = self._pipeline.registry
            model, card = registry.model, registry.card
            check_model(request.model, model)
            if card is None:
                raise Unavailable("no worker serves", retry_after_s=1.0, reason="NO_WORKER")
            return pb.GetModelInfoResponse(
                name=model.name,
                family=card.family,
                context=model.context,
                vocab_size=model.vocab_size,
                dtype=card.dtype,
                quantization=card.quantization,
                kv_dtype=card.kv_dtype,
                attention=card.attention,
                transports=card.transports,
                proposers=card.proposers,
            )

        return await self._answered(info, context)

    async def _answer(self, box: list[pb.GenerateRequest], context, emit: Emit) -> None:
        record = self._record(box[0], context)
        error: BaseException | None = None
        self.num_running += 1
        self._on_begin(record)
        try:
            await self._answered(lambda: self._serve(box, context, record, emit), context, record)
        except BaseException as raised:
            error = raised.__context__ if isinstance(raised, grpc.aio.AbortError) and raised.__context__ else raised
            raise
        finally:
            self.num_running -= 1
            record.stamps.ended = (error is None and record.stamps.last_sent) or now()
            request_trace.draw(record, error)
            self._on_end(record, error)

    async def _serve(self, box: list[pb.GenerateRequest], context, record: RequestRecord, emit: Emit) -> None:
        deadline = self._deadline(context, record.stamps.received)
        if self.is_draining:
            raise Unavailable("this gateway is shutting down", retry_after_s=1.0, reason="DRAINING")
        model = self._pipeline.registry.model
        max_priority = self._pipeline.admission.quotas.quota(record.tenant).max_priority
        record.checked = checked = check(box.pop(), model, record.tenant, max_priority)
        await self._pipeline.serve(checked, model, deadline, record, emit)

    async def _answered(self, work: Callable[[], Awaitable], context, record: RequestRecord | None = None):
        """Run `work`; what it raises becomes the call's status. Cancellation is passed on, also that of a write to a
        client that has gone."""
        try:
            return await work()
        except BatonError as error:
            await self._hold(error)
            await abort(context, error)
        except grpc.aio.InternalError:  # the client has just gone: gRPC's cancellation is on its way
            raise asyncio.CancelledError from None
        except Exception as error:
            trace_id = f"{record.context.trace_id:032x}" if record else ""
            log.exception("request failed %s", fields(trace_id=trace_id, error=type(error).__name__))
            await abort(context, Internal(f"the gateway failed: {type(error).__name__}"))

    def _record(self, request: pb.GenerateRequest, context) -> RequestRecord:
        received = now()
        parent = _traceparent(context)
        root = new_context(parent, self._settings.trace_sample)
        return RequestRecord(
            context=root,
            parent=parent or TraceContext(root.trace_id, 0, root.sampled),
            stamps=Stamps(received),
            model=self._pipeline.registry.model.name,
            operation="chat" if request.WhichOneof("input") == "messages" else "text_completion",
            tenant=guard.tenant(),
        )

    def _deadline(self, context, received: float) -> float:
        """Return the client's deadline, within our own bound (time.monotonic()). Raises DeadlineExceeded if it has
        passed."""
        left_s = context.time_remaining()
        if left_s is None:
            left_s = self._settings.default_timeout_s
        if left_s <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        return received + min(left_s, self._settings.max_timeout_s)


def _traceparent(context) -> TraceContext | None:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return parse_traceparent(value)
    return None


def _add(response: pb.CompleteResponse, message: pb.GenerateResponse) -> None:
    """Add a streamed message to the one answer."""
    while len(response.choices) <= message.index:
        response.choices.add(index=len(response.choices))
    choice = response.choices[message.index]
    choice.text += message.text
    choice.token_ids.extend(message.token_ids)
    choice.logprobs.extend(message.logprobs)
    if message.finish_reason:
        choice.finish_reason, choice.matched_stop = message.finish_reason, message.matched_stop
    if message.HasField("seed"):
        response.seed, response.request_id = message.seed, message.request_id
    if message.HasField("usage"):
        response.usage.CopyFrom(message.usage)
        response.timing.CopyFrom(message.timing)
