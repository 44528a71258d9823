"""The asyncio client. blocking.py has the same methods without asyncio."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

from baton.client.connection import SERVICE, ConnectionSettings
from baton.client.errors import CallError, read_call_error
from baton.client.request import (
    ChatMessages,
    EmbedOptions,
    GenerateOptions,
    Prompt,
    ScoreOptions,
    make_embed_request,
    make_request,
    make_score_request,
    make_tokenize_request,
    to_messages,
)
from baton.client.resuming import Received, ResumingStream, make_resumable
from baton.client.retries import Addresses, Attempts, RetryPolicy
from baton.v1 import inference_pb2 as pb

ReplyT = TypeVar("ReplyT", bound=Message)
Metadata = Sequence[tuple[str, str]]


class AsyncClient:
    """The client for one event loop: `async with AsyncClient(...)`, or `await close()`."""

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        api_key: str | Callable[[], str] | None = None,
        tls: bool = False,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        tls_server_name: str | None = None,
        timeout_s: float | None = 600.0,
        retry: RetryPolicy = RetryPolicy(),
    ):
        """Make a client; it connects at the first call.

        `target`: host:port of a gateway, or of several with commas between; one is asked, and the next when it fails.
        Calls take turns over all IP addresses of a host name. `api_key`: the key, or a function that returns it, called
        in the event loop before each attempt, so it should not block. `tls_ca`: file with the authority of the
        gateways' certificates. `tls`: trust the public authorities, which gRPC ships or finds in the file
        GRPC_DEFAULT_SSL_ROOTS_FILE_PATH. Without both the client speaks plain text. `timeout_s`: of each call with its
        retries, unless the call has its own. Raises ValueError, OSError."""
        self._settings = ConnectionSettings(api_key, tls, tls_ca, tls_cert, tls_key, tls_server_name)
        self._addresses = Addresses(target, self._open)
        self._timeout_s, self._retry = timeout_s, retry

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> pb.CompleteResponse:
        """Return the whole answer to a text, token ids or messages. Raises CallError, ValueError."""
        return await self.complete(make_request(prompt, options), timeout_s=timeout_s, metadata=metadata)

    async def complete(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.CompleteResponse:
        """Return the whole answer to a request message. Raises CallError."""
        again = request
        if self._retry.resends:
            request = make_resumable(request)
            # A retry gets what the first attempt has generated so far, if the gateway still has it.
            again = Received(request).rest()
        return await self._call(
            "Complete", pb.CompleteResponse, lambda num: request if num == 1 else again, timeout_s, metadata
        )

    async def chat(
        self,
        messages: ChatMessages,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> pb.CompleteResponse:
        """Return the whole answer to messages, each `{"role": ..., "content": ...}`. Raises CallError, ValueError."""
        return await self.generate(to_messages(messages), timeout_s=timeout_s, metadata=metadata, **options)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> "AsyncStream":
        """Stream the answer to a text, token ids or messages. Raises ValueError."""
        return self.send(make_request(prompt, options), timeout_s=timeout_s, metadata=metadata)

    def send(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> "AsyncStream":
        """Stream the answer to a request message."""
        attempts = Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s)
        return AsyncStream(self._addresses, request, attempts, lambda: self._metadata(metadata), self._retry.resends)

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[ScoreOptions],
    ) -> pb.ScoreResponse:
        """Return how well each document answers the query, 0 to 1; this needs a reranking model. Raises CallError,
        ValueError."""
        request = make_score_request(query, documents, options)
        return await self._call("Score", pb.ScoreResponse, lambda _: request, timeout_s, metadata)

    async def tokenize(
        self, prompt: str | ChatMessages, *, model: str = "", timeout_s: float | None = None
    ) -> list[int]:
        """Return the token ids of a text, or of messages in the model's chat template. Raises CallError, ValueError."""
        request = make_tokenize_request(prompt, model)
        return list((await self._call("Tokenize", pb.TokenizeResponse, lambda _: request, timeout_s)).token_ids)

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[EmbedOptions],
    ) -> pb.EmbedResponse:
        """Return a vector for each text or list of token ids. Raises CallError, ValueError."""
        request = make_embed_request(inputs, options)
        return await self._call("Embed", pb.EmbedResponse, lambda _: request, timeout_s, metadata)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None) -> str:
        """Return the text of token ids. Raises CallError."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return (await self._call("Detokenize", pb.DetokenizeResponse, lambda _: request, timeout_s)).text

    async def token_texts(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None
    ) -> list[pb.TokenText]:
        """Return the text of each of at most 1,024 tokens on its own. Raises CallError."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, return_tokens=True)
        return list((await self._call("Detokenize", pb.DetokenizeResponse, lambda _: request, timeout_s)).tokens)

    async def model_info(self, model: str = "", *, timeout_s: float | None = None) -> pb.GetModelInfoResponse:
        """Return the properties of a model; its name may be omitted if the gateway serves one. Raises CallError."""
        request = pb.GetModelInfoRequest(model=model)
        return await self._call("GetModelInfo", pb.GetModelInfoResponse, lambda _: request, timeout_s)

    async def list_models(self, *, timeout_s: float | None = None) -> list[pb.GetModelInfoResponse]:
        """Return the properties of each served model. Raises CallError."""
        request = pb.ListModelsRequest()
        return list((await self._call("ListModels", pb.ListModelsResponse, lambda _: request, timeout_s)).models)

    async def close(self) -> None:
        """End all running calls; later calls get CANCELLED."""
        for methods in self._addresses.close():
            await methods.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _open(self, target: str) -> "AsyncMethods":
        credentials = self._settings.channel_credentials()
        if credentials is None:
            return AsyncMethods(grpc.aio.insecure_channel(target, options=self._settings.options))
        return AsyncMethods(grpc.aio.secure_channel(target, credentials, options=self._settings.options))

    def _metadata(self, more: Metadata) -> tuple[tuple[str, str], ...]:
        return (*self._settings.metadata, *more)

    async def _call(
        self,
        name: str,
        reply: type[ReplyT],
        request_of: Callable[[int], Message],
        timeout_s: float | None,
        metadata: Metadata = (),
    ) -> ReplyT:
        """Return the reply to `request_of(attempt number)`, with retries."""
        attempts = Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s)
        while True:
            index, methods = self._addresses.current()
            try:
                method = methods.unary(name, reply)
                return await method(
                    request_of(attempts.num), timeout=attempts.left_s, metadata=self._metadata(metadata)
                )
            except grpc.RpcError as raised:
                error = read_call_error(raised)
            except asyncio.CancelledError:  # gRPC raises it both when the caller's task is cancelled and after close()
                if is_cancelling():
                    raise
                raise CallError(grpc.StatusCode.CANCELLED, "cancelled") from None
            pause_s = attempts.pause_s(error)
            self._addresses.leave(index, error)
            await pause(self._addresses, asyncio.Event(), pause_s)


class AsyncStream(ResumingStream, AsyncIterator[pb.GenerateResponse]):
    """The messages of one answer. A stream that breaks is resumed without losing or repeating a token. A stream whose
    reader leaves is cancelled."""

    def __init__(
        self,
        addresses: "Addresses[AsyncMethods]",
        request: pb.GenerateRequest,
        attempts: Attempts,
        metadata: Callable[[], tuple[tuple[str, str], ...]],
        resumes: bool,
    ):
        """Send `request` immediately. `metadata()` is called for each attempt."""
        super().__init__(request, attempts, resumes)
        self._addresses, self._metadata = addresses, metadata
        self._cancelled = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._index, self._call = self._open(self._request)

    def cancel(self) -> None:
        """Cancel the request; its reader gets CANCELLED."""
        self._cancelled.set()
        self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        while True:
            try:
                message = await self._call.read()
            except grpc.RpcError as raised:
                await self._again(read_call_error(raised))
                continue
            except (
                asyncio.CancelledError
            ):  # gRPC raises it both when the caller's task is cancelled and after cancel() or close()
                if is_cancelling():
                    raise
                raise CallError(grpc.StatusCode.CANCELLED, "cancelled") from None
            if not isinstance(message, pb.GenerateResponse):
                raise StopAsyncIteration
            if self._take(message):
                return message

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # A reader may leave an `async for` by `break`, and gRPC keeps a call until it ends. The collector may run in
        # any thread.
        call = getattr(self, "_call", None)  # absent if the first request could not be sent
        if call is not None and not call.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the call
                self._loop.call_soon_threadsafe(call.cancel)

    def _open(
        self, request: pb.GenerateRequest
    ) -> "tuple[int, grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]]":
        index, methods = self._addresses.current()
        return index, methods.generate(request, timeout=self._attempts.left_s, metadata=self._metadata())

    async def _again(self, error: CallError) -> None:
        """Request the rest of the answer after a pause. Raises `error` if a retry cannot help, CANCELLED if the stream
        was cancelled."""
        rest, pause_s = self._rest_after(error)
        await pause(self._addresses, self._cancelled, pause_s)
        if self._cancelled.is_set():
            raise CallError(grpc.StatusCode.CANCELLED, "cancelled")
        self._addresses.leave(self._index, error)
        self._index, self._call = self._open(rest)


async def pause(addresses: "Addresses[AsyncMethods]", ended: asyncio.Event, pause_s: float) -> None:
    """Wait for `pause_s`, or until `ended` is set, as it is when the client closes."""
    with addresses.ending(ended), contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause_s):
            await ended.wait()


def is_cancelling() -> bool:
    """Return whether the running task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncMethods:
    """A channel and its methods."""

    def __init__(self, channel: grpc.aio.Channel):
        self.channel = channel
        self.generate: grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse] = (
            channel.unary_stream(
                f"{SERVICE}Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
            )
        )

    def unary(self, name: str, reply: type[ReplyT]) -> "grpc.aio.UnaryUnaryMultiCallable[Message, ReplyT]":
        """Return the unary method `name`, which returns `reply`."""
        return self.channel.unary_unary(
            f"{SERVICE}{name}", lambda message: message.SerializeToString(), reply.FromString
        )
