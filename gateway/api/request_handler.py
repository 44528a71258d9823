"""Check, record and serve requests of any transport, and answer them in messages of baton.v1. A request that ends
without an answer ends with a BatonError."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import grpc

from baton.service.clock import now
from baton.service.errors import BatonError, DeadlineExceeded, Internal, NoWorker, Unavailable
from baton.service.logs import fields
from baton.service.observe.telemetry import TraceContext, new_context
from baton.service.security import guard
from baton.v1 import inference_pb2 as pb
from baton.v1 import worker_pb2
from gateway.answer.answer import Emit
from gateway.answer.whole_answer import WholeAnswer
from gateway.api.owned_request import OwnedRequest
from gateway.catalog.catalog import Catalog, VersionUse
from gateway.catalog.model_version import ModelVersion
from gateway.config.served_model import ServedModel
from gateway.config.settings import GatewaySettings
from gateway.fleet.registry import Registry
from gateway.observe import request_trace
from gateway.queue.admission import AdmissionControl
from gateway.request.embedding import check_embed
from gateway.request.prompt_batch import PromptBatch
from gateway.request.request_record import RequestRecord
from gateway.request.scoring import LABELS, check_score, score_of
from gateway.request.timing import Stamps
from gateway.request.validation import check_detokenize, check_model, check_size, resolve_request_id, validate
from gateway.text.detokenizer import Detokenizer

# gRPC sends a deadline in few digits, rounded up by 1 % at most, while its client ends the call at the exact time.
_ROUNDED_SHARE, _ON_ITS_WAY_S = 0.01, 0.1

log = logging.getLogger(__name__)


class CallContext(NamedTuple):
    """What a transport knows about a call besides its message and its tenant."""

    time_left_s: float | None = None  # None: the client named no deadline
    parent: TraceContext | None = None  # the client's span
    has_deadline: bool = True  # False: `time_left_s` is the default

    def after(self, seconds: float) -> "CallContext":
        """Return this context as it is that many seconds later."""
        return self if self.time_left_s is None else self._replace(time_left_s=self.time_left_s - seconds)


class _ErrorMapping:
    """Map exceptions of its block to BatonError or cancellation: an unexpected one becomes Internal, and a write to a
    disconnected client a cancellation. A BatonError is delayed until it may be sent. This is a class because another
    coroutine around the handler's costs a kilobyte of each open stream, and is resumed for every message."""

    __slots__ = ("_pace_refusal", "_trace_id")

    def __init__(self, pace_refusal: Callable[[BatonError], Awaitable[None]], trace_id: int = 0):
        self._pace_refusal, self._trace_id = pace_refusal, trace_id

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, BatonError):
            await self._pace_refusal(error)
        elif isinstance(error, grpc.aio.InternalError):  # the client has just disconnected: gRPC will cancel the call
            raise asyncio.CancelledError from None
        elif isinstance(error, Exception):
            text = fields(trace_id=self._trace_id and f"{self._trace_id:032x}", error=type(error).__name__)
            log.error("request failed %s", text, exc_info=error)
            raise Internal(f"the gateway failed: {type(error).__name__}") from error


class RequestHandler:
    """Answer requests of this gateway's clients, by any transport."""

    def __init__(
        self,
        catalog: Catalog,
        registry: Registry,
        admission: AdmissionControl,
        settings: GatewaySettings,
        on_begin: Callable[[RequestRecord], None],
        on_end: Callable[[RequestRecord, BaseException | None], None],
        pace_refusal: Callable[[BatonError], Awaitable[None]],
    ):
        """`on_begin(record)` and `on_end(record, error)` are each called once for a request, however it ends.
        `pace_refusal(error)` waits until the error may be sent."""
        self.is_draining = False
        self.num_running = 0
        self._catalog, self._registry, self._admission, self._settings = catalog, registry, admission, settings
        self._on_begin, self._on_end, self.pace_refusal = on_begin, on_end, pace_refusal

    def model(self, asked: str) -> ServedModel:
        """Return the model that a request names, as the call's tenant sees it. For an unknown name any model is
        returned, as the request will end with an error anyway."""
        tenant = guard.tenant()
        return self._catalog.find_or_first(asked, tenant).seen_by(tenant)

    @property
    def max_timeout_s(self) -> float:
        """Return the longest that a request may take."""
        return self._settings.max_timeout_s

    def with_deadline(self, call: CallContext) -> CallContext:
        """Return the context of a call with a deadline: its own, or the default one."""
        if call.time_left_s is not None:
            return call
        return call._replace(time_left_s=self._settings.default_timeout_s, has_deadline=False)

    def max_concurrent(self, asked: str) -> int | None:
        """Return how many choices of this model the call's tenant may have running at once; None: any number."""
        return self._admission.quotas.max_concurrent(guard.tenant(), self.model(asked).name)

    def detokenizer(self, asked: str) -> Detokenizer:
        """Return the detokenizer of the model that a request names."""
        return self._catalog.find_or_first(asked, guard.tenant()).pipeline.text.detokenizer

    def own_ids(self, asked: str) -> tuple[list[int], list[int]]:
        """Return the special tokens that the named model's tokenizer adds before and after a text."""
        return self._catalog.find_or_first(asked, guard.tenant()).pipeline.text.own_ids

    def not_ready(self) -> str | None:
        """Return why no request can be served now, or None."""
        return "draining" if self.is_draining else self._registry.not_ready()

    async def generate(self, owned: OwnedRequest, call: CallContext, emit: Emit) -> None:
        """Take the request and answer it in messages for `emit`. Raises BatonError."""
        operation = "chat" if owned.request.WhichOneof("input") == "messages" else "text_completion"
        record = self._record(operation, call, owned.request.request_id)
        async with _Recording(self, record):
            deadline = self._opened(call, record)
            del call  # no longer needed, so not kept while the answer is written
            request = owned.take()
            with self._using(request.model, record.tenant, record) as version:
                model = version.seen_by(record.tenant)
                max_priority = self._max_priority(record.tenant)
                record.validated = validate(request, model, record.tenant, max_priority, record.request_id)
                del request  # and its prompt
                await version.pipeline.serve(record.validated, model, deadline, record, emit)

    async def embed(self, request: pb.EmbedRequest, call: CallContext) -> pb.EmbedResponse:
        """Return a vector for each input. Raises BatonError."""
        record = self._record("embeddings", call, request.request_id)
        async with _Recording(self, record):
            deadline = self._opened(call, record)
            with self._using(request.model, record.tenant, record) as version:
                batch = self._embed_batch(request, version, record.tenant, record.request_id)
                vectors = await version.pooling.pool_prompts(batch, version.seen_by(record.tenant), deadline, record)
            return pb.EmbedResponse(
                embeddings=[pb.Embedding(values=each) for each in vectors],
                usage=pb.Usage(prompt_tokens=record.num_prompt_tokens),
                request_id=batch.prompts[0].request_id,
            )

    def check_embed(self, request: pb.EmbedRequest) -> int:
        """Check a request without serving it, and return how many numbers a vector will have, 0 if no worker has
        connected yet. Raises InvalidRequest, NotFound, Unavailable, as `embed` would."""
        tenant = guard.tenant()
        version = self._catalog.find(request.model, tenant)
        self._embed_batch(request, version, tenant, resolve_request_id(request.request_id))
        return request.dimensions or _hidden_size(version)

    async def score(self, request: pb.ScoreRequest, call: CallContext) -> pb.ScoreResponse:
        """Return how well each document answers the query. Raises BatonError."""
        record = self._record("rerank", call, request.request_id)
        async with _Recording(self, record):
            deadline = self._opened(call, record)
            with self._using(request.model, record.tenant, record) as version:
                model, label_ids = version.seen_by(record.tenant), version.pipeline.text.label_ids(LABELS)
                max_priority = self._max_priority(record.tenant)
                batch = check_score(request, model, label_ids, record.tenant, max_priority, record.request_id)
                found = await version.pooling.pool_prompts(batch, model, deadline, record)
            return pb.ScoreResponse(
                scores=map(score_of, found),
                usage=pb.Usage(prompt_tokens=record.num_prompt_tokens),
                request_id=batch.prompts[0].request_id,
            )

    def begin(self, record: RequestRecord) -> None:
        """Record that a request has begun."""
        self.num_running += 1
        self._on_begin(record)

    def refuse(self, operation: str, body: Mapping[str, object], call: CallContext, error: BatonError) -> None:
        """Record a request that its transport refuses. `body`: as sent; it may name a model and an id."""
        asked, given = (value if isinstance(value := body.get(name), str) else "" for name in ("model", "request_id"))
        record = self._record(operation, call, given)
        with contextlib.suppress(BatonError):
            record.model = self._catalog.find(asked, record.tenant).name
        self.begin(record)
        error.request_id = record.request_id
        self.end(record, error)

    def end(self, record: RequestRecord, error: BaseException | None) -> None:
        """Record the end of a request."""
        self.num_running -= 1
        record.stamps.ended = (error is None and record.stamps.last_sent) or now()
        request_trace.emit(record, error)
        self._on_end(record, error)

    async def complete(self, owned: OwnedRequest, call: CallContext) -> pb.CompleteResponse:
        """Take the request and return its answer in one message. Raises BatonError."""
        answer = WholeAnswer()
        await self.gather(owned, call, answer.add)
        return answer.response()

    async def gather(
        self, owned: OwnedRequest, call: CallContext, add: Callable[[pb.GenerateResponse], object]
    ) -> None:
        """Take the request and call `add` with each message of its answer, whose tool calls come whole. Raises
        BatonError."""
        if owned.request.WhichOneof("input") == "messages":
            owned.request.messages.stream_tool_arguments = False

        async def emit(message: pb.GenerateResponse) -> None:
            add(message)

        await self.generate(owned, call, emit)

    async def tokenize(self, request: pb.TokenizeRequest, call: CallContext) -> pb.TokenizeResponse:
        """Return the token ids of a text or a conversation. Raises BatonError."""
        async with _ErrorMapping(self.pace_refusal):
            check_size(request)
            tenant = guard.tenant()
            with self._using(request.model, tenant) as version:
                model = version.seen_by(tenant)
                check_model(request.model, model)
                until = self._deadline(call, now())
                return pb.TokenizeResponse(token_ids=await version.pipeline.tokenize(request, model, tenant, until))

    async def detokenize(self, request: pb.DetokenizeRequest, call: CallContext) -> pb.DetokenizeResponse:
        """Return the text of token ids. Raises BatonError."""
        async with _ErrorMapping(self.pace_refusal):
            check_detokenize(request)
            tenant = guard.tenant()
            with self._using(request.model, tenant) as version:
                model = version.seen_by(tenant)
                check_model(request.model, model)
                until = self._deadline(call, now())
                text = await version.pipeline.detokenize(request.token_ids, model, tenant, until)
                text_of = version.pipeline.text.detokenizer.token_text
                return pb.DetokenizeResponse(
                    text=text, tokens=map(text_of, request.token_ids if request.return_tokens else ())
                )

    async def model_info(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        """Return the description of one model. Raises BatonError."""
        async with _ErrorMapping(self.pace_refusal):
            tenant = guard.tenant()
            version = self._catalog.find(request.model, tenant)
            model = version.seen_by(tenant)
            adapter = check_model(request.model, model)
            if version.fleet.card is None:
                raise NoWorker(f"no worker serves {version.name}")
            found = _described(version, model)
            if adapter:
                found.name = request.model
            return found

    async def models(self) -> pb.ListModelsResponse:
        """Return the descriptions of all models. Raises NoWorker if none has a worker."""
        async with _ErrorMapping(self.pace_refusal):
            tenant, versions = guard.tenant(), self._catalog.current
            if all(version.fleet.card is None for version in versions):
                raise NoWorker("no worker serves")
            return pb.ListModelsResponse(models=[_described(each, each.seen_by(tenant)) for each in versions])

    def _embed_batch(
        self, request: pb.EmbedRequest, version: ModelVersion, tenant: str, request_id: str
    ) -> PromptBatch:
        model, max_priority = version.seen_by(tenant), self._max_priority(tenant)
        return check_embed(request, model, _hidden_size(version), tenant, max_priority, request_id)

    def _using(self, asked: str, tenant: str, record: RequestRecord | None = None) -> VersionUse:
        """Return a context manager that keeps the named version of a model in use. Raises NotFound, InvalidRequest,
        Unavailable."""
        version = self._catalog.find(asked, tenant)
        if record is not None:
            record.model = version.name
        return self._catalog.using(version)

    def _opened(self, call: CallContext, record: RequestRecord) -> float:
        """Record the deadline of a request and return it. Raises BatonError if it has passed or the gateway drains."""
        record.has_deadline = call.has_deadline and call.time_left_s is not None
        record.asked_s = call.time_left_s or 0.0
        deadline = self._deadline(call, record.stamps.received)
        if self.is_draining:
            raise Unavailable("this gateway is shutting down", retry_after_s=1.0, reason="DRAINING")
        return deadline

    def _max_priority(self, tenant: str) -> int:
        return self._admission.quotas.quota(tenant).max_priority

    def _record(self, operation: str, call: CallContext, given_id: str) -> RequestRecord:
        received = now()
        root = new_context(call.parent, self._settings.trace_sample)
        return RequestRecord(
            context=root,
            parent=call.parent or TraceContext(root.trace_id, 0, root.sampled),
            stamps=Stamps(received),
            model=self._catalog.only_name,  # until the request's own model is known
            operation=operation,
            tenant=guard.tenant(),
            request_id=resolve_request_id(given_id),
        )

    def explain_deadline(self, record: RequestRecord) -> str:
        """Return what to add to the error when a deadline passed that the gateway set; "" if the client set it."""
        if not record.has_deadline:
            given_s = min(self._settings.default_timeout_s, self.max_timeout_s)
            return f": the request named no deadline, and has {given_s:g} s here"
        if record.asked_s > self.max_timeout_s:
            return f": of {record.asked_s:.0f} s asked for this gateway gives {self.max_timeout_s:g}"
        return ""

    def _deadline(self, call: CallContext, received: float) -> float:
        """Return the client's deadline, within the gateway's bound (time.monotonic()). Raises DeadlineExceeded if it
        has passed."""
        left_s = self._settings.default_timeout_s if call.time_left_s is None else call.time_left_s
        if left_s <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        return received + min(left_s, self.max_timeout_s)


class _Recording(_ErrorMapping):
    """Record the beginning and the end of a request, however it ends, and map its errors."""

    __slots__ = ("_handler", "_record")

    def __init__(self, handler: RequestHandler, record: RequestRecord):
        super().__init__(handler.pace_refusal, record.context.trace_id)
        self._handler, self._record = handler, record

    async def __aenter__(self) -> None:
        self._handler.begin(self._record)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, DeadlineExceeded):
            error.message += self._handler.explain_deadline(self._record)
        try:
            await super().__aexit__(kind, error, traceback)
        except BaseException as raised:
            self._end(raised)
            raise
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError) and _is_at_deadline(self._record):
            error = DeadlineExceeded("the client ended the call at its deadline")
        if isinstance(error, BatonError):
            error.request_id = self._record.request_id
        self._handler.end(self._record, error)


def _is_at_deadline(record: RequestRecord) -> bool:
    """Return whether the client's deadline passes about now, as either side's timer may fire first."""
    least_s = (1 - _ROUNDED_SHARE) * record.asked_s - _ON_ITS_WAY_S
    return record.has_deadline and now() - record.stamps.received >= least_s


def _hidden_size(version: ModelVersion) -> int:
    """Return the hidden size of the model, 0 if no worker has connected yet."""
    return 0 if version.fleet.card is None else version.fleet.card.hidden_size


def _described(version: ModelVersion, model: ServedModel) -> pb.GetModelInfoResponse:
    """Return the description of a model; without workers the fields that they would tell stay empty."""
    card = version.fleet.card or worker_pb2.ModelCard()
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
        adapters=sorted(model.adapters),
    )
