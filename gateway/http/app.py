"""Serve the paths of the HTTP APIs, each by the gRPC call that it stands for."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.service.errors import BatonError, InvalidRequest, NotFound
from baton.service.net.host_names import HostCheck, HostNames
from baton.service.net.server import MAX_METADATA_BYTES
from baton.service.security.guard import MAX_METADATA_PAIRS, Guard
from baton.v1 import inference_pb2 as pb
from gateway.api.owned_request import OwnedRequest
from gateway.api.request_handler import CallContext, RequestHandler
from gateway.http.anthropic.answer import MessageWriter
from gateway.http.anthropic.request import read_count_tokens, read_messages
from gateway.http.call import HttpCall, ToError, WriteTimeout
from gateway.http.fan_out import serve_all
from gateway.http.fields.body import ParsedBody
from gateway.http.fields.conversation import TOKENIZE_NAMES
from gateway.http.openai.answers import ChatWriter, CompletionWriter
from gateway.http.openai.embeddings import (
    ParsedEmbeddings,
    ParsedRerank,
    read_cohere_rerank,
    read_embeddings,
    read_rerank,
)
from gateway.http.openai.requests import (
    DETOKENIZE_NAMES,
    field_of_prompt,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from gateway.http.openapi import document
from gateway.http.responses.answer import NUM_LEVELS, ResponseWriter
from gateway.http.responses.request import read_input_tokens, read_response
from gateway.http.wire.encoding import Json, to_bytes, to_bytes_in_turns
from gateway.http.wire.errors import BadCall, status_of, to_anthropic, to_json
from gateway.http.wire.pooling_answers import cohere_rerank, embedding, embedding_bytes, embeddings, rerank
from gateway.http.wire.writers import AnswerWriter, EventWriter, TokenTexts

_INFERENCE = "/baton.v1.Inference/"
_MESSAGES = "/v1/messages"  # the prefix of Anthropic's paths
_MAX_VECTOR_BYTES = 32 << 20  # of one answer: 2,048 vectors of 2,048 numbers in base64 fit
_MAX_LOGPROBS = 2_500_000  # of an answer in one object: a prompt with 8 choices may have 2,424,832
_MAX_AT_ONCE = 32  # prompts of one call, so that other calls find room beside them
# Headers of an answer that scripts of web pages may read.
_SHOWN_HEADERS = ("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry")
T = TypeVar("T")


class HttpApi:
    """Serve the calls of the HTTP APIs."""

    def __init__(self, handler: RequestHandler):
        self._handler, self._created = handler, int(time.time())

    async def chat_completions(self, call: HttpCall) -> None:
        """Serve POST /v1/chat/completions."""
        body, context = self._read(call, "chat", read_chat)
        await self._answer(call, context, body, ChatWriter(body, *self._known(body)))

    async def completions(self, call: HttpCall) -> None:
        """Serve POST /v1/completions."""
        body, context = self._read(call, "text_completion", read_completion)
        await self._answer(call, context, body, CompletionWriter(body, *self._known(body)))

    async def responses(self, call: HttpCall) -> None:
        """Serve POST /v1/responses."""
        body, context = self._read(call, "chat", read_response)
        writer = ResponseWriter(body, call.values, *self._known(body))
        requests = _take(call, body)
        if body.stream:
            return await self._stream(call, context, writer, requests)
        await self._handler.gather(requests[0], context, writer.add)
        await call.reply_json(await to_bytes_in_turns(writer.whole(), NUM_LEVELS))

    async def input_tokens(self, call: HttpCall) -> None:
        """Serve POST /v1/responses/input_tokens."""
        request, call.field_names = read_input_tokens(call.values)
        num_tokens = len((await self._handler.tokenize(request, call.context)).token_ids)
        await call.reply({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def messages(self, call: HttpCall) -> None:
        """Serve POST /v1/messages."""
        body, context = self._read(call, "chat", read_messages)
        writer = MessageWriter(body, self._known(body)[0], call.values)
        await self._answer(call, context, body, writer)

    async def count_tokens(self, call: HttpCall) -> None:
        """Serve POST /v1/messages/count_tokens."""
        request, call.field_names = read_count_tokens(call.values)
        await call.reply({"input_tokens": len((await self._handler.tokenize(request, call.context)).token_ids)})

    async def embeddings(self, call: HttpCall) -> None:
        """Serve POST /v1/embeddings."""
        read = partial(read_embeddings, most_inputs=self._most_inputs(call.values))
        body, context = self._read(call, "embeddings", read)
        if len(body.requests) > 1:
            await self._check(call, body)
        num_texts, usage = sum(len(request.inputs) for request in body.requests), pb.Usage()

        async def embed(group: int, context: CallContext) -> list[bytes]:
            request, call.field_names = body.requests[group], body.names[group]
            response, objects = await self._handler.embed(request, context), list[bytes]()
            call.request_id = call.request_id or response.request_id
            _check_size(num_texts, len(response.embeddings[0].values), body.encoding)
            usage.prompt_tokens += response.usage.prompt_tokens
            for each in response.embeddings:
                index = group * len(body.requests[0].inputs) + len(objects)
                objects.append(embedding(index, each.values, body.encoding))
                await asyncio.sleep(0)  # other calls wait for one vector at most: 4,096 numbers take 3 ms
            return objects

        groups = await serve_all(embed, len(body.requests), 1, self._handler.with_deadline(context))
        objects = list(itertools.chain.from_iterable(groups))
        await call.reply_json(embeddings(objects, self._name(body.requests[0].model), usage))

    async def rerank(self, call: HttpCall) -> None:
        """Serve POST /v1/rerank and /rerank."""
        body, response = await self._score(call, read_rerank)
        documents = body.request.documents if body.return_documents else ()
        await call.reply(rerank(response, documents, body.top_n, self._name(body.request.model)))

    async def cohere_rerank(self, call: HttpCall) -> None:
        """Serve POST /v2/rerank."""
        body, response = await self._score(call, read_cohere_rerank)
        await call.reply(cohere_rerank(response, body.top_n))

    async def models(self, call: HttpCall) -> None:
        """Serve GET /v1/models."""
        models = (await self._handler.models()).models
        names = [(name, info) for info in models for name in (info.name, *info.adapters)]
        listed = [self._described(name, info.name, info.context) for name, info in names]
        await call.reply({"object": "list", "data": listed})

    async def model(self, call: HttpCall) -> None:
        """Serve GET /v1/models/{model}."""
        name = call.path_params["model"]
        info, model = await self._handler.model_info(pb.GetModelInfoRequest(model=name)), self._handler.model(name)
        await call.reply(self._described(info.name, model.name, info.context))

    async def tokenize(self, call: HttpCall) -> None:
        """Serve POST /tokenize."""
        request = read_tokenize(call.values)
        call.field_names = TOKENIZE_NAMES
        token_ids = list((await self._handler.tokenize(request, call.context)).token_ids)
        if request.HasField("text") and call.values.get("add_special_tokens") is False:
            before, behind = self._handler.own_ids(request.model)
            token_ids = token_ids[len(before) : len(token_ids) - len(behind)]
        context = self._handler.model(request.model).context
        await call.reply({"count": len(token_ids), "max_model_len": context, "tokens": token_ids})

    async def detokenize(self, call: HttpCall) -> None:
        """Serve POST /detokenize."""
        request = read_detokenize(call.values)
        call.field_names = DETOKENIZE_NAMES
        await call.reply({"prompt": (await self._handler.detokenize(request, call.context)).text})

    async def _score(
        self, call: HttpCall, read: Callable[[Mapping[str, Any]], ParsedRerank]
    ) -> tuple[ParsedRerank, pb.ScoreResponse]:
        body, context = self._read(call, "rerank", read)
        call.field_names = body.names
        response = await self._handler.score(body.request, context)
        call.request_id = response.request_id
        return body, response

    def _most_inputs(self, values: Mapping[str, Any]) -> int:
        """Return how many texts a request may have for the model that a body names."""
        name = values.get("model")
        return self._handler.model(name if isinstance(name, str) else "").limits.inputs

    async def _check(self, call: HttpCall, body: ParsedEmbeddings) -> None:
        """Check all texts of a call before any is embedded and counted for a quota. Raises and records BatonError."""
        num_texts = sum(len(request.inputs) for request in body.requests)
        try:
            for request, names in zip(body.requests, body.names, strict=True):
                call.field_names = names
                _check_size(num_texts, self._handler.check_embed(request), body.encoding)
                await asyncio.sleep(0)  # let other calls run
        except BatonError as error:
            self._handler.refuse("embeddings", call.values, call.without_deadline, error)
            raise

    def _known(self, body: ParsedBody) -> tuple[str, TokenTexts]:
        name = body.requests[0].model
        return self._name(name), self._handler.detokenizer(name)

    def _name(self, name: str) -> str:
        """Return the model's name in an answer; an adapter has the name that the request gives."""
        model = self._handler.model(name)
        return name if model.find(name) else model.name

    def _read(self, call: HttpCall, operation: str, read: Callable[[Mapping[str, Any]], T]) -> tuple[T, CallContext]:
        """Return the body as `read` parses it, and the context of the call. Raises and records InvalidRequest."""
        try:
            return read(call.values), call.context
        except InvalidRequest as error:
            self._handler.refuse(operation, call.values, call.without_deadline, error)
            raise

    async def _answer(self, call: HttpCall, context: CallContext, body: ParsedBody, writer: AnswerWriter) -> None:
        num_at_once = self._num_at_once(body)
        requests = _take(call, body)
        if body.stream:
            return await self._stream(call, context, writer, requests, num_at_once)

        num_logprobs = 0

        async def complete(prompt: int, context: CallContext) -> pb.CompleteResponse:
            nonlocal num_logprobs
            response = await self._handler.complete(_for_handler(requests, prompt), context)
            requests[prompt].drop()
            num_logprobs += _num_logprobs(response)
            if num_logprobs > _MAX_LOGPROBS:
                message = f"answers have over {_MAX_LOGPROBS} log-probabilities in all: send fewer prompts, or stream"
                raise InvalidRequest("prompt", message)
            return response

        deadline = self._handler.with_deadline(context)
        responses = await serve_all(complete, len(requests), num_at_once, deadline, field_of=field_of_prompt)
        await call.reply_json(await to_bytes_in_turns(writer.whole(responses)))

    def _num_at_once(self, body: ParsedBody) -> int:
        """Return how many prompts of a call may run at once, within the tenant's quota, which would refuse others."""
        most = self._handler.max_concurrent(body.requests[0].model)
        return _MAX_AT_ONCE if most is None else min(_MAX_AT_ONCE, max(1, most // body.num_choices))

    async def _stream(
        self,
        call: HttpCall,
        context: CallContext,
        writer: EventWriter,
        requests: Sequence[OwnedRequest],
        num_at_once: int = 1,
    ) -> None:
        call.open_stream(writer.error_event, writer.ping)
        usages, begun = list[pb.Usage](), set[int]()
        for each in requests:
            if each.request.WhichOneof("input") == "messages":
                each.request.messages.stream_tool_arguments = True

        async def emit(prompt: int, message: pb.GenerateResponse) -> None:
            begun.add(prompt)
            requests[prompt].drop()  # it is not retried
            if message.HasField("usage"):
                usages.append(message.usage)
            if not call.has_begun:
                await call.begin_stream()
            data = writer.chunk(prompt, message)
            if data := data if isinstance(data, bytes) else await data:
                await call.write(data)

        def generate(prompt: int, context: CallContext) -> Awaitable[None]:
            return self._handler.generate(_for_handler(requests, prompt), context, partial(emit, prompt))

        deadline = self._handler.with_deadline(context)
        await serve_all(generate, len(requests), num_at_once, deadline, begun, field_of_prompt)
        data = writer.tail(usages)
        await call.end(data if isinstance(data, bytes) else await data)

    def _described(self, name: str, model: str, context: int) -> Json:
        """Return the description of a model, or of an adapter of `model`, called `name`."""
        parent = {} if name == model else {"parent": model}
        known = {"id": name, "object": "model", "created": self._created, "owned_by": "baton"}
        return {**known, "root": model, **parent, "max_model_len": context}


class _Endpoint:
    """Serve one path as an ASGI application of its own, without Starlette's Request, which nothing here needs."""

    def __init__(
        self, guard: Guard, method: str, serve: Callable[[HttpCall], Coroutine[Any, Any, None]], to_error: ToError
    ):
        """Serve a path by `serve`; the permissions and slots of `method` of baton.v1.Inference apply to it."""
        self._guard, self._method, self._serve, self._to_error = guard, _INFERENCE + method, serve, to_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await HttpCall(scope, receive, send, self._to_error).run(self._guard, self._method, self._serve)


def make_app(
    handler: RequestHandler, guard: Guard, origins: Sequence[str] = (), host_names: HostNames | None = None
) -> ASGIApp:
    """Return the application. `origins`: of web pages that may call it; `host_names`: the names that the Host header
    may have, if calls need no credentials."""
    api, openapi = HttpApi(handler), to_bytes(document())

    def route(path: str, serve: Callable, method: str, verb: str = "POST", tell: ToError = to_json) -> Route:
        return Route(path, _Endpoint(guard, method, serve, tell), methods=[verb])

    async def openapi_json(request: Request) -> Response:
        return Response(openapi, media_type="application/json")

    async def health(request: Request) -> Response:
        return Response(status_code=503 if handler.not_ready() else 200)

    routes = [
        route("/v1/chat/completions", api.chat_completions, "Generate"),
        route("/v1/completions", api.completions, "Generate"),
        route("/v1/responses", api.responses, "Generate"),
        route("/v1/responses/input_tokens", api.input_tokens, "Tokenize"),
        route(_MESSAGES, api.messages, "Generate", tell=to_anthropic),
        route(f"{_MESSAGES}/count_tokens", api.count_tokens, "Tokenize", tell=to_anthropic),
        route("/v1/embeddings", api.embeddings, "Embed"),
        route("/v1/rerank", api.rerank, "Score"),
        route("/rerank", api.rerank, "Score"),  # vLLM has this path too, and LiteLLM only this one
        route("/v2/rerank", api.cohere_rerank, "Score"),
        route("/v1/models", api.models, "ListModels", "GET"),
        route("/v1/models/", api.models, "ListModels", "GET"),  # not a model with an empty name
        route("/v1/models/{model:path}", api.model, "GetModelInfo", "GET"),
        route("/tokenize", api.tokenize, "Tokenize"),
        route("/detokenize", api.detokenize, "Detokenize"),
        Route("/health", health),
        Route("/openapi.json", openapi_json),
    ]
    middleware = [Middleware(HostCheck, names=host_names, refuse=_refuse_host)] if host_names else []
    if origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_SHOWN_HEADERS,
        )
        middleware.insert(0, cors)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={404: _elsewhere, 405: _elsewhere})
    app.router.redirect_slashes = False
    return WriteTimeout(app)


def refuse_head(is_too_large: bool, path: str) -> Response:
    """Return the answer to a head that is not HTTP, or too large."""
    if is_too_large:
        message = f"has over {MAX_METADATA_BYTES} bytes or {MAX_METADATA_PAIRS} headers"
        return _error_response(BadCall("head", message, "HEAD_TOO_LARGE"), path)
    return _error_response(InvalidRequest("head", "this is no HTTP/1.1"), path)


def _refuse_host(host: str, path: str) -> Response:
    told = "is not this one: --admin-hosts (of `baton up` --gateway.admin-hosts) lists its names"
    return _error_response(BadCall("host", told, "UNKNOWN_HOST"), path)


async def _elsewhere(request: Request, raised: Exception) -> Response:
    """Return the answer to an unknown path, or to a method that a path does not take."""
    path = request.url.path[:100]
    if isinstance(raised, HTTPException) and raised.status_code == 405:
        headers = raised.headers or {}
        told = f"{path} takes {headers.get('Allow', 'another one')}, not {request.method[:20]}"
        return _error_response(BadCall("method", told, "METHOD_NOT_ALLOWED"), path, headers)
    return _error_response(NotFound(f"{path} is not here; /openapi.json lists the paths"), path)


def _error_response(error: BatonError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    tell = to_anthropic if f"{path}/".startswith(f"{_MESSAGES}/") else to_json
    return Response(to_bytes(tell(error, {})), status_of(error), headers, media_type="application/json")


def _check_size(num_texts: int, num_numbers: int, encoding: str) -> None:
    """Raise InvalidRequest if so many vectors, of so many numbers each, are too large for an answer."""
    if num_texts * embedding_bytes(num_numbers, encoding) > _MAX_VECTOR_BYTES:
        message = f"{num_texts} vectors have over {_MAX_VECTOR_BYTES} bytes: send fewer texts, or ask for base64"
        raise InvalidRequest("input", message)


def _num_logprobs(response: pb.CompleteResponse) -> int:
    """Return how many log-probabilities an answer has: each choice repeats the prompt's before its own."""
    rows = [response.prompt_logprobs] * len(response.choices) + [choice.logprobs for choice in response.choices]
    return sum(len(row) * (1 + len(row[0].top)) for row in rows if row)


def _take(call: HttpCall, body: ParsedBody) -> list[OwnedRequest]:
    """Take the requests out of the body, so that no prompt is kept while its answer is written."""
    call.field_names, call.request_id = body.names, body.requests[0].request_id
    requests = list(map(OwnedRequest, body.requests))
    body.requests.clear()
    call.values.clear()
    return requests


def _for_handler(requests: Sequence[OwnedRequest], prompt: int) -> OwnedRequest:
    """Return a request for the handler to take. One of several is kept here too, until its answer has begun or ended,
    as it may have to be retried."""
    return requests[prompt] if len(requests) == 1 else requests[prompt].shared()
