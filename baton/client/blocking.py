"""The blocking client. aio.py has the same methods for asyncio."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar, Unpack

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


class Client:
    """The blocking client, which threads may share: `with Client(...)`, or `close()`."""

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
        before each attempt. `tls_ca`: file with the authority of the gateways' certificates. `tls`: trust the public
        authorities, which gRPC ships or finds in the file GRPC_DEFAULT_SSL_ROOTS_FILE_PATH. Without both the client
        speaks plain text. `timeout_s`: of each call with its retries, unless the call has its own. Raises ValueError,
        OSError."""
        self._settings = ConnectionSettings(api_key, tls, tls_ca, tls_cert, tls_key, tls_server_name)
        self._addresses = Addresses(target, self._open)
        self._timeout_s, self._retry = timeout_s, retry

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> pb.CompleteResponse:
        """Return the whole answer to a text, token ids or messages. Raises CallError, ValueError."""
        return self.complete(make_request(prompt, options), timeout_s=timeout_s, metadata=metadata)

    def complete(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.CompleteResponse:
        """Return the whole answer to a request message. Raises CallError."""
        again = request
        if self._retry.resends:
            request = make_resumable(request)
            # A retry gets what the first attempt has generated so far, if the gateway still has it.
            again = Received(request).rest()
        return self._call(
            "Complete", pb.CompleteResponse, lambda num: request if num == 1 else again, timeout_s, metadata
        )

    def chat(
        self,
        messages: ChatMessages,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> pb.CompleteResponse:
        """Return the whole answer to messages, each `{"role": ..., "content": ...}`. Raises CallError, ValueError."""
        return self.generate(to_messages(messages), timeout_s=timeout_s, metadata=metadata, **options)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> "Stream":
        """Stream the answer to a text, token ids or messages. Raises ValueError."""
        return self.send(make_request(prompt, options), timeout_s=timeout_s, metadata=metadata)

    def send(self, request: pb.GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()) -> "Stream":
        """Stream the answer to a request message."""
        attempts = Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s)
        return Stream(self._addresses, request, attempts, lambda: self._metadata(metadata), self._retry.resends)

    def score(
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
        return self._call("Score", pb.ScoreResponse, lambda _: request, timeout_s, metadata)

    def tokenize(self, prompt: str | ChatMessages, *, model: str = "", timeout_s: float | None = None) -> list[int]:
        """Return the token ids of a text, or of messages in the model's chat template. Raises CallError, ValueError."""
        request = make_tokenize_request(prompt, model)
        return list(self._call("Tokenize", pb.TokenizeResponse, lambda _: request, timeout_s).token_ids)

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[EmbedOptions],
    ) -> pb.EmbedResponse:
        """Return a vector for each text or list of token ids. Raises CallError, ValueError."""
        request = make_embed_request(inputs, options)
        return self._call("Embed", pb.EmbedResponse, lambda _: request, timeout_s, metadata)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None) -> str:
        """Return the text of token ids. Raises CallError."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return self._call("Detokenize", pb.DetokenizeResponse, lambda _: request, timeout_s).text

    def token_texts(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None
    ) -> list[pb.TokenText]:
        """Return the text of each of at most 1,024 tokens on its own. Raises CallError."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, return_tokens=True)
        return list(self._call("Detokenize", pb.DetokenizeResponse, lambda _: request, timeout_s).tokens)

    def model_info(self, model: str = "", *, timeout_s: float | None = None) -> pb.GetModelInfoResponse:
        """Return the properties of a model; its name may be omitted if the gateway serves one. Raises CallError."""
        request = pb.GetModelInfoRequest(model=model)
        return self._call("GetModelInfo", pb.GetModelInfoResponse, lambda _: request, timeout_s)

    def list_models(self, *, timeout_s: float | None = None) -> list[pb.GetModelInfoResponse]:
        """Return the properties of each served model. Raises CallError."""
        request = pb.ListModelsRequest()
        return list(self._call("ListModels", pb.ListModelsResponse, lambda _: request, timeout_s).models)

    def close(self) -> None:
        """End all running calls; they and later calls get CANCELLED."""
        for methods in self._addresses.close():
            methods.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self, target: str) -> "Methods":
        credentials = self._settings.channel_credentials()
        if credentials is None:
            return Methods(grpc.insecure_channel(target, options=self._settings.options))
        return Methods(grpc.secure_channel(target, credentials, options=self._settings.options))

    def _metadata(self, more: Metadata) -> tuple[tuple[str, str], ...]:
        return (*self._settings.metadata, *more)

    def _call(
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
                return method(request_of(attempts.num), timeout=attempts.left_s, metadata=self._metadata(metadata))
            except grpc.RpcError as raised:
                error = read_call_error(raised)
            pause_s = attempts.pause_s(error)
            self._addresses.leave(index, error)
            closed = threading.Event()
            with self._addresses.ending(closed):
                closed.wait(pause_s)


class Stream(ResumingStream, Iterator[pb.GenerateResponse]):
    """The messages of one answer. A stream that breaks is resumed without losing or repeating a token."""

    def __init__(
        self,
        addresses: "Addresses[Methods]",
        request: pb.GenerateRequest,
        attempts: Attempts,
        metadata: Callable[[], tuple[tuple[str, str], ...]],
        resumes: bool,
    ):
        """Send `request` immediately. `metadata()` is called for each attempt."""
        super().__init__(request, attempts, resumes)
        self._addresses, self._metadata = addresses, metadata
        self._cancelled = threading.Event()
        self._index, self._call = self._open(self._request)

    def cancel(self) -> None:
        """Cancel the request, from any thread; its reader gets CANCELLED."""
        self._cancelled.set()
        self._call.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pb.GenerateResponse:
        while True:
            try:
                message = next(self._call)
            except grpc.RpcError as raised:
                self._again(read_call_error(raised))
                continue
            if self._take(message):
                return message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    def _open(self, request: pb.GenerateRequest) -> "tuple[int, ReplyCall]":
        index, methods = self._addresses.current()
        return index, methods.generate(request, timeout=self._attempts.left_s, metadata=self._metadata())

    def _again(self, error: CallError) -> None:
        """Request the rest of the answer after a pause. Raises `error` if a retry cannot help, CANCELLED if the stream
        was cancelled."""
        rest, pause_s = self._rest_after(error)
        with self._addresses.ending(self._cancelled):
            if self._cancelled.wait(pause_s):
                raise CallError(grpc.StatusCode.CANCELLED, "cancelled")
        self._addresses.leave(self._index, error)
        self._index, self._call = self._open(rest)
        if self._cancelled.is_set():  # cancel() was called meanwhile, and cancelled the old stream only
            self._call.cancel()


class ReplyCall(Protocol):
    """The object that gRPC returns for a call with a streamed reply."""

    def __next__(self) -> pb.GenerateResponse: ...
    def cancel(self) -> bool: ...


class Methods:
    """A channel and its methods."""

    def __init__(self, channel: grpc.Channel):
        self.channel = channel
        self.generate: grpc.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse] = channel.unary_stream(
            f"{SERVICE}Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )

    def unary(self, name: str, reply: type[ReplyT]) -> "grpc.UnaryUnaryMultiCallable[Message, ReplyT]":
        """Return the unary method `name`, which returns `reply`."""
        return self.channel.unary_unary(
            f"{SERVICE}{name}", lambda message: message.SerializeToString(), reply.FromString
        )
