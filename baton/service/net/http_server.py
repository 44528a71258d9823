"""An HTTP server: uvicorn in this process and its event loop, with a bound on connections."""

import asyncio
import ctypes
import logging
import socket
import ssl
from collections.abc import Sequence

import uvicorn
from starlette.types import ASGIApp

from baton import tasks
from baton.service.net.http_connection import IDLE_S, HttpConnection, RefuseHead
from baton.service.net.server import HANDSHAKE_S, listening_socket, num_descriptors
from baton.service.security.tls import Tls

LAST_PART_S = 30.0  # for a client to read the end of an answer

_STOP_S = 1
_PORT_SHARE = 6  # of the descriptors; gRPC's ports take a third each
_DATE_S = 1.0  # between two looks at the clock
_BACKLOG = 2048
_ACCEPTS_A_TURN = 16  # of the event loop: streams do not wait for a flood of connections
_ACCEPT_PAUSE_S = 0.05  # where there are no descriptors left
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 128 << 10  # glibc's default, before it adapts

# It would log each stranger's bytes that are no HTTP.
logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


class HttpServer(uvicorn.Server):
    """Serve an application at one address, from `start` to `stop`. At the limit of connections, a new one replaces the
    one that has waited longest for a request; a running request is never ended for it."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        refuse_head: RefuseHead,
        tls: Tls | None = None,
        headers: Sequence[tuple[str, str]] = (),
        max_connections: int | None = None,
        unread_s: float | None = None,
    ):
        """Make the server. `headers` go out with each answer; `max_connections` is a sixth of the descriptors unless
        given; `unread_s` bounds how long an answer may wait for room in its connection, for an application that sets no
        bound itself."""
        config = uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=list(headers),
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=_STOP_S,
        )
        super().__init__(config)
        self.port: int = listener.getsockname()[1]
        self._listener, self._tls = listener, tls and tls.context()
        self.refuse_head = refuse_head
        self.waiting: dict[HttpConnection, None] = {}  # between requests or amid a head; the longest first
        self.unread_s, self.last_part_s = unread_s, unread_s or LAST_PART_S
        self.is_draining = False
        self._max_connections = max_connections or num_descriptors() // _PORT_SHARE
        self._opening: set[asyncio.Task] = set()  # connections, TLS handshakes among them
        self._date_task: asyncio.Task | None = None

    def start(self) -> None:
        """Start serving."""
        if self._tls:
            _map_buffers()
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        self.servers = []
        # uvicorn's own task could fail unseen, wakes ten times a second, and counts a connection only after its
        # TLS handshake.
        self._date_task = tasks.start("http date", self._date)
        self._watch_port()

    def drain(self) -> None:
        """Stop accepting connections and keeping them open: a client's next request opens a new one, which may lead to
        another process."""
        self.is_draining = True
        if self._is_open:
            self._accept(_BACKLOG)  # those that wait, which would be reset otherwise
            self._close_port()
        for connection in self._connections:
            connection.drain()

    @property
    def is_busy(self) -> bool:
        """Whether a request arrives or runs, or the end of an answer is unread."""
        return any(each.is_busy for each in self._connections)

    async def stop(self) -> None:
        """Close the port and end everything that still runs."""
        self._close_port()
        for task in (self._date_task, *self._opening):
            if task:
                task.cancel()
        if self.server_state.connections or self.server_state.tasks:
            await self.shutdown()  # waits 0.1 s, also for none

    @property
    def _connections(self) -> list[HttpConnection]:
        return [each for each in self.server_state.connections if isinstance(each, HttpConnection)]

    async def _date(self) -> None:
        """Update the Date header."""
        while True:
            await self.on_tick(0)
            await asyncio.sleep(_DATE_S)

    def _watch_port(self) -> None:
        if self._is_open:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _close_port(self) -> None:
        if self._is_open:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()

    @property
    def _is_open(self) -> bool:
        return self._listener.fileno() >= 0

    def _accept(self, most: int = _ACCEPTS_A_TURN) -> None:
        """Accept connections that wait, `most` of them. The loop calls this, and logs what it raises: a connection that
        was only in the future of a task would be lost with the task."""
        try:
            for _ in range(most):
                self._admit(self._listener.accept()[0])
        except BlockingIOError:
            pass
        except OSError:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(_ACCEPT_PAUSE_S, self._watch_port)

    def _admit(self, connection: socket.socket) -> None:
        if len(self._opening) + len(self.server_state.connections) >= self._max_connections:
            if (oldest := next((each for each in self.waiting if each.is_idle), None)) is None:
                connection.close()
                return
            oldest.abort()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        timeout_s = HANDSHAKE_S if self._tls else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: HttpConnection(self), connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (OSError, ssl.SSLError):
            connection.close()


def open_http(
    address: str,
    app: ASGIApp,
    refuse_head: RefuseHead,
    tls: Tls | None = None,
    headers: Sequence[tuple[str, str]] = (),
    max_connections: int | None = None,
    unread_s: float | None = None,
) -> HttpServer:
    """Bind the port; `start` begins to serve it. Raises ListenError."""
    return HttpServer(app, listening_socket(address, _BACKLOG), refuse_head, tls, headers, max_connections, unread_s)


def _map_buffers() -> None:
    """Make each TLS connection return its buffer of 256 KiB when it closes. Once one is freed, glibc would take later
    buffers from the heap, where 3,300 simultaneous connections leave 930 MiB behind that later ones touch bit by
    bit."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
