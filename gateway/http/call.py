"""Run one HTTP call behind the same guard as gRPC's: find the tenant by its key, hold a slot from before the body is
read, bound the body's size and time, and answer a client that may disconnect at any moment."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.service.errors import BatonError, Internal, InvalidRequest
from baton.service.logs import fields
from baton.service.net.http_connection import ABORT, FLOW
from baton.service.net.http_server import LAST_PART_S
from baton.service.observe.telemetry import parse_traceparent
from baton.service.security.guard import METHODS, Guard
from gateway.api.request_handler import CallContext
from gateway.http.fields.body import parse
from gateway.http.wire.encoding import Json, event, to_bytes
from gateway.http.wire.errors import BadCall, headers_of, status_of
from gateway.request.validation import MAX_REQUEST_BYTES, REQUEST_ID

TIMEOUT_HEADER = "x-request-timeout"  # the deadline in seconds, which gRPC has a field of its own for
_LINGER_S = 1.0  # of reading on: a client that still sends its body does not read an answer yet
_LAST_WORDS_S = 1.0  # for an error to a client that does not read
_FIRST_SILENCE_S = 30.0  # until a stream begins: before that an error can have its own status
_SILENCE_S = 15.0  # between events; usual proxies cut a silent stream after 60 s, clients for Node after 300
_ID_HEADERS = (b"x-request-id", b"request-id")  # where OpenAI's and Anthropic's clients find a request's id
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer the stream
)


log = logging.getLogger(__name__)


class ClientGone(asyncio.CancelledError):
    """The client has disconnected or does not read, so nobody waits for an answer. It counts as a cancellation of the
    call."""


ToError = Callable[[BatonError, Mapping[str, str]], Json]
"""Returns the body for an error. The mapping holds the client's names for fields of baton.v1."""


class HttpCall:
    """A request over HTTP and its answer. Once the body was read, `field_names` holds the client's names for
    fields of baton.v1, and `request_id` the id in logs."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, to_error: ToError):
        self.headers = Headers(scope=scope)
        self.path_params: Mapping[str, str] = scope["path_params"]
        self.values: dict[str, Any] = {}  # of the body, until they were read
        self.field_names: Mapping[str, str] = {}
        self.request_id = ""
        self.has_begun = False  # whether the answer has begun
        self._has_ended = False
        self._has_read_all = False
        self._is_gone = False
        self._to_event = event
        self._ping, self._ping_at = b"", None
        self._scope, self._receive, self._send, self._to_error = scope, receive, send, to_error

    async def run(self, guard: Guard, method: str, serve: Callable[["HttpCall"], Coroutine[Any, Any, None]]) -> None:
        """Let `serve` answer if the guard allows `method`, the gRPC call that this one stands for. A BatonError becomes
        the answer, and so does an unexpected exception."""
        peer, is_served = _peer(self._scope), False
        try:
            tenant = guard.identify(self._shown, METHODS[method])
            with guard.enter(method, METHODS[method], tenant, frozenset(), peer) as slot:
                body = await slot.first(self._body)
                if self._scope["method"] == "POST":
                    self.values = parse(body)
                del body  # no longer needed, so not kept while the answer is written
                is_served = True
                await self._while_connected(serve(self))
        except BatonError as error:
            if not is_served:
                await guard.pace_refusal(error)
                guard.note_denied(method, error, peer)
            with suppress(ClientGone):
                await self._fail(error)
        except ClientGone:
            pass
        except Exception as error:
            log.error("request failed %s", fields(method=method, error=type(error).__name__), exc_info=error)
            with suppress(ClientGone):
                await self._fail(Internal(f"the gateway failed: {type(error).__name__}"))

    @property
    def _shown(self) -> list[str]:
        """Return the credentials. Anthropic's clients send a key as x-api-key, and some in both headers."""
        keys = [f"Bearer {key}" for key in self.headers.getlist("x-api-key")]
        return list(dict.fromkeys(self.headers.getlist("authorization") + keys))

    @property
    def without_deadline(self) -> CallContext:
        """Return the context of the call, with the trace that its headers name and no deadline."""
        return CallContext(parent=parse_traceparent(self.headers.get("traceparent", "")))

    @property
    def context(self) -> CallContext:
        """Return the context of the call, with the deadline and the trace of its headers. Raises InvalidRequest."""
        text = self.headers.get(TIMEOUT_HEADER)
        if text is None:
            return self.without_deadline
        try:
            time_left_s = float(text)
        except ValueError:
            time_left_s = math.nan
        if not math.isfinite(time_left_s):
            raise InvalidRequest(TIMEOUT_HEADER, "must be a number of seconds")
        return self.without_deadline._replace(time_left_s=time_left_s)

    async def reply(self, value: Json, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Answer with one object."""
        await self.reply_json(to_bytes(value), status, headers)

    async def reply_json(self, body: bytes, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Answer with one object that is JSON already."""
        own = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))
        await self._begin(status, (*own, *headers))
        await self.end(body)

    def open_stream(self, to_event: Callable[[Json], bytes], ping: bytes) -> None:
        """Make the answer a stream of events. This must be called before anything is awaited, as the watch begins at
        the first await and checks only then whether to send pings. `to_event`: turns the body of an error into the last
        event; `ping`: is sent when nothing else is, so that neither client nor proxy takes the stream for dead."""
        self._to_event, self._ping = to_event, ping
        self._ping_at = _time() + _FIRST_SILENCE_S

    async def begin_stream(self) -> None:
        """Send the status and the headers of a stream."""
        await self._begin(200, _STREAM_HEADERS)

    async def write(self, data: bytes) -> None:
        """Send a part of a stream; wait for a client that reads slowly."""
        self._ping_at = _time() + _SILENCE_S
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last part of the answer. Raises ClientGone."""
        await self._end(data, LAST_PART_S)  # bounded, as the call holds its tenant's slot meanwhile

    async def _begin(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.has_begun = True
        if REQUEST_ID.fullmatch(self.request_id):
            headers = (*headers, *((name, self.request_id.encode()) for name in _ID_HEADERS))
        # This waits for room in the connection if its client has not read the previous answer.
        await self._within(LAST_PART_S, {"type": "http.response.start", "status": status, "headers": list(headers)})

    async def _fail(self, error: BatonError) -> None:
        """Answer with the error: as a status, or as the last event if the answer has begun."""
        value, headers = self._to_error(error, self.field_names), headers_of(error)
        self.request_id = error.request_id or self.request_id
        if self.has_begun:
            await self._end(self._to_event(value), _LAST_WORDS_S)
        elif self._has_read_all:
            await self.reply(value, status_of(error), tuple(headers))
        else:
            body = to_bytes(value)
            own = ((b"content-type", b"application/json"), (b"connection", b"close"))
            await self._begin(status_of(error), (*own, (b"content-length", b"%d" % len(body)), *headers))
            await self._within(_LAST_WORDS_S, {"type": "http.response.body", "body": body, "more_body": True})
            await self._read_on()
            await self.end()

    async def _end(self, data: bytes, within_s: float) -> None:
        self._has_ended = True
        await self._within(within_s, {"type": "http.response.body", "body": data})

    async def _within(self, seconds: float, message: Message) -> None:
        """Send a message within so many seconds. Raises ClientGone, and notes it."""
        try:
            await _send_within(seconds, self._scope, self._send, message)
        except ClientGone:
            self._is_gone = True
            raise

    async def _read_on(self) -> None:
        """Read and drop what the client still sends: if the connection closed now, the client would report that, and
        never read the answer."""
        try:
            async with asyncio.timeout(_LINGER_S):
                while (await self._receive()).get("more_body"):
                    pass
        except TimeoutError:
            return

    async def _body(self) -> bytes:
        """Return the body. Raises BadCall if it is too large or not JSON, ClientGone if the client disconnects."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if self._scope["method"] == "POST" and kind != "application/json":
            # This also keeps out pages of other hosts: for them a browser sends JSON only if this host allows it.
            raise BadCall("content-type", "must be application/json", "NOT_JSON")
        body, length = bytearray(), self.headers.get("content-length", "").lstrip("0")  # the parser bounds its digits
        while True:
            if len(body) > MAX_REQUEST_BYTES or (length.isdecimal() and int(length) > MAX_REQUEST_BYTES):
                raise BadCall("body", f"has over {MAX_REQUEST_BYTES} bytes", "BODY_TOO_LARGE")
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if not message.get("more_body") and len(body) <= MAX_REQUEST_BYTES:
                self._has_read_all = True
                return bytes(body)

    async def _while_connected(self, work: Awaitable[None]) -> None:
        """Await the work. When the client disconnects, the work is cancelled and ClientGone raised."""
        task = asyncio.current_task()
        assert task is not None
        watching = asyncio.create_task(self._watch(task))
        try:
            await work
        except asyncio.CancelledError:
            if not self._is_gone:
                raise
            task.uncancel()
            raise ClientGone from None
        finally:
            watching.cancel()

    async def _watch(self, task: asyncio.Task) -> None:
        """Cancel the task when the client disconnects; until then send pings in a silent stream."""
        while True:
            try:
                async with asyncio.timeout_at(self._ping_at):
                    if (await self._receive())["type"] == "http.disconnect":
                        break
            except TimeoutError:
                await self._break_silence()
        if not self._has_ended:
            self._is_gone = True
            task.cancel()

    async def _break_silence(self) -> None:
        """Send a ping, unless something was written meanwhile or the client has not read what was. With room in the
        connection the write does not wait, so no other part of the answer comes between."""
        if self._ping_at is None or _time() < self._ping_at:
            return
        self._ping_at = _time() + _SILENCE_S
        if not self._scope["extensions"][FLOW].write_paused:
            if not self.has_begun:
                await self.begin_stream()
            await self.write(self._ping)


class WriteTimeout:
    """Wrap an application to disconnect clients that do not read. This bounds the last part of any answer, such as
    pages and refusals, which are no HttpCall; the other parts of a stream may wait as long as its request may take."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            if message.get("more_body"):
                await send(message)
            else:
                await _send_within(LAST_PART_S, scope, send, message)

        with suppress(ClientGone):
            await self._app(scope, receive, send_in_time)


async def _send_within(seconds: float, scope: Scope, send: Send, message: Message) -> None:
    """Send a message. If the client does not read, so that there is no room within so many seconds, abort the
    connection and raise ClientGone."""
    try:
        async with asyncio.timeout(seconds):
            await send(message)
    except TimeoutError:
        scope["extensions"][ABORT]()
        raise ClientGone from None


def _time() -> float:
    """Return the time of the event loop."""
    return asyncio.get_running_loop().time()


def _peer(scope: Scope) -> str:
    """Return the client's address in gRPC's form."""
    host, port = scope["client"] or ("", 0)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
