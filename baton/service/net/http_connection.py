"""One connection of an HTTP server: uvicorn's protocol, with bounds on its heads and on the requests that wait in
it."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import httptools
import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.service.net.server import MAX_METADATA_BYTES
from baton.service.security.guard import MAX_METADATA_PAIRS
from baton.system import num_unacknowledged

# Extensions of a request's scope: what ends the connection at once, and its FlowControl, which says whether what was
# written waits for room.
ABORT, FLOW = "baton.abort", "baton.flow"
IDLE_S = 75  # of a connection between two requests: longer than clients keep one, so that they close it first

# From the connection, or the first byte after an answer, to the end of a request's head; a body that was not waited for
# comes in that time too.
_HEAD_S = 5.0
_FLUSH_S = 5.0  # for a client to notice that a connection ends, or to read why
_MAX_WAITING = 16  # requests of a connection, behind the one that runs; each may have 8 KiB of head, and 64 of body
_MAX_WAITING_BYTES = 64 << 10  # uvicorn would read no more until it is its turn, and not hear the client hang up

RefuseHead = Callable[[bool, str], Response]
"""What is answered to a head that is no HTTP, or (True) too large; the path, as far as it was read."""


class HttpPort(Protocol):
    """What a connection needs of its server: uvicorn's configuration and state, and the bounds of HttpServer."""

    config: uvicorn.Config
    server_state: ServerState
    refuse_head: RefuseHead
    waiting: dict["HttpConnection", None]
    unread_s: float | None
    last_part_s: float
    is_draining: bool


class HttpConnection(HttpToolsProtocol):
    """One connection. Its heads are bounded in bytes, entries, time and number. It is closed if it is silent at first
    or within a head, or if the client does not read its last answer in time."""

    def __init__(self, server: HttpPort):
        super().__init__(server.config, server.server_state, {})
        self._server = server
        self.url = b""
        self._in_head, self._num_head_bytes, self._num_headers = False, 0, 0
        self._in_body = False
        self._has_begun_head = False  # with its first byte; `_in_head` is where one may come
        self._has_ended_request = False  # in what was received last
        self._running: RequestResponseCycle | None = None  # the request that runs, or ran last; `cycle` is the newest
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._begin_head()
        self._timer = self.loop.call_later(_HEAD_S, transport.abort)

    @property
    def is_idle(self) -> bool:
        """Whether no request of this connection runs."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_busy(self) -> bool:
        """Whether a request arrives or runs, or the client has not read the end of the last answer. A client that keeps
        a TLS connection open does not see its end and leaves it open; unread bytes lie below the transport, so the
        socket is asked."""
        if self._has_begun_head or not self.is_idle:
            return True
        if not self.transport.is_closing():
            return False
        sock = self.transport.get_extra_info("socket")
        return self.transport.get_write_buffer_size() > 0 or num_unacknowledged(sock) > 0

    def drain(self) -> None:
        """Close an idle connection that is kept open; otherwise close it after the answer to the request that arrives
        or runs."""
        if not self.is_idle or (self.timeout_keep_alive_task is not None and not self._has_begun_head):
            self.shutdown()

    def abort(self) -> None:
        """Close the connection immediately."""
        self._end_head()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._end_unread()
        self._end_head()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:  # uvicorn tells the newest alone
            self._running.disconnected = True
            self._running.message_event.set()
        # uvicorn leaves it to run where a connection was reset, and with it for IDLE_S all that the connection had.
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        self._has_ended_request = False
        self._unset_keepalive_if_required()
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserError:
            self.send_400_response("")
        # A body may come behind an answer that did not wait for it, and a head begin behind the end of a request.
        if self._in_head and not (self._in_body or self._has_ended_request):
            self._num_head_bytes += len(data)
        if self.transport.is_closing():
            self._abort_in(_FLUSH_S)
        elif self._in_head and self._num_head_bytes > MAX_METADATA_BYTES:
            self.send_400_response("")
        elif self._in_head and self.timeout_keep_alive_task is None and self._timer.cancelled():
            self._abort_in(_HEAD_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._server.unread_s is not None:
            self._unread_timer = self.loop.call_later(self._server.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_unread()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort, FLOW: self.flow}  # pyright: ignore[reportGeneralTypeIssues]
        self._begin_head()
        self._has_begun_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # a trailer is no header (RFC 9110, 6.5.1): a proxy that sets or removes one misses it
            super().on_header(name, value)
        self._num_headers += 1
        if self._num_headers > MAX_METADATA_PAIRS or sum(map(_size, self.headers)) > MAX_METADATA_BYTES:
            self._num_head_bytes = MAX_METADATA_BYTES + 1
            raise httptools.HttpParserError("head too large")  # ends the connection with send_400_response

    def on_headers_complete(self) -> None:
        if self._offers_upgrade:
            self._num_headers = 0
            return
        self._end_head()
        self._num_head_bytes = self._num_headers = 0
        self._timer.cancel()
        if len(self.pipeline) >= _MAX_WAITING:
            raise httptools.HttpParserError("too many requests")
        super().on_headers_complete()
        self._in_body, self._has_begun_head = True, False
        if not self.pipeline:
            self._running = self.cycle
        self.flow.resume_reading()  # uvicorn stops where a request waits, and would not hear the client hang up
        if self._server.is_draining:
            self.cycle.keep_alive = False
        if self.parser.get_http_version() == "1.0":
            _end_by_close(self.cycle)

    def on_body(self, body: bytes) -> None:
        if self.pipeline and len(self.cycle.body) + len(body) > _MAX_WAITING_BYTES:
            raise httptools.HttpParserError("body too large to wait")
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        super().on_message_complete()
        self._in_body, self._has_ended_request = False, True

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]  # which it starts
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_in(self._server.last_part_s)
        elif self.cycle.response_complete:  # no further request waits
            self._begin_head()

    def shutdown(self) -> None:
        """Close the connection, after the answer to a request that runs."""
        if self.transport.is_closing():
            return
        super().shutdown()
        if self.transport.is_closing():
            self._abort_in(self._server.last_part_s)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_in(_FLUSH_S)

    def send_400_response(self, msg: str) -> None:
        """Answer a head that is too large or no HTTP; hang up if the answer would be inside that of another request."""
        is_of_body = self._in_body and not self.pipeline and not self.cycle.response_started
        if not (self.is_idle or is_of_body):
            self.abort()
            return
        path = self.url.partition(b"?")[0].decode("latin-1")
        refusal = self._server.refuse_head(self._num_head_bytes > MAX_METADATA_BYTES, path)
        head = [b"%s: %s\r\n" % pair for pair in (*refusal.raw_headers, (b"connection", b"close"))]
        self.transport.write(b"".join([STATUS_LINE[refusal.status_code], *head, b"\r\n", refusal.body]))
        self.transport.close()

    @property
    def _offers_upgrade(self) -> bool:
        """Whether the head that was just read offers to switch to another protocol."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _feed(self, data: memoryview) -> None:
        """Parse `data`. After an offer of another protocol, such as h2c, the parser would read no body, and nothing at
        all if the connection is to close; so a new parser reads the head again without the offer, as HTTP allows.
        Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._offers_upgrade:
                    return  # CONNECT, which was refused
                data = data[upgrade.args[0] :]
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        headers = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"".join([b"%s %s HTTP/%s\r\n" % (method, self.url, version), *headers, b"\r\n"])

    def _begin_head(self) -> None:
        self._in_head = True
        self._server.waiting.setdefault(self)

    def _end_head(self) -> None:
        self._in_head = False
        self._server.waiting.pop(self, None)

    def _end_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()

    def _abort_in(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self.transport.abort)


def _end_by_close(cycle: RequestResponseCycle) -> None:
    """End an HTTP/1.0 answer by closing the connection, since HTTP/1.0 has no chunked encoding."""
    send = cycle.send

    async def send_as_it_is(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.chunked_encoding, cycle.send = False, send_as_it_is


def _size(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1])
