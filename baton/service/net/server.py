"""Run an object as a gRPC process: server options, a port or one clear line, health, reflection, signals."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.addresses import AddressError, split_address
from baton.protocol import KEEPER_VARIABLE
from baton.service.logs import fields

MAX_MESSAGE_BYTES = 16 << 20  # between our own processes: the ids of the longest prompt fit
MAX_METADATA_BYTES = 8192
MAX_PENDING_CALLS = 16_384
MAX_PENDING_S = 3600  # the longest deadline of a request: a call ends with its own
HANDSHAKE_S = 5.0  # for TLS, and for the first words of HTTP/2; gRPC's own is 120 s
IDLE_S = 300.0  # of a connection without calls
_FEW_DESCRIPTORS = 8192
_PORT_SHARE = 3  # of the descriptors a port takes one in three: workers, Redis and files have the rest
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

T = TypeVar("T")

log = logging.getLogger(__name__)


class ListenError(Exception):
    """The address cannot be listened on; the message is one line."""


class AddressInUse(ListenError):
    """Another process listens there."""


def make_server(
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """A server that accepts our clients' keepalive and refuses larger messages than `max_message_bytes`."""
    options = (
        # Clients ping every 2 s; against the default minimum that would be GOAWAY too_many_pings on healthy streams.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 10_000),  # finds clients that vanished without a FIN
        ("grpc.http2.ping_timeout_ms", 5000),
        ("grpc.http2.max_pings_without_data", 0),
        # Between a soft and a higher hard limit gRPC would refuse some calls and not others.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),  # it has been computed: who receives it has a bound
        # A message is expanded whole before its length is compared, at 15 ms for 8 KiB that become 8 MiB, on the one
        # thread that all calls wait for: compressed ones are refused by their head.
        ("grpc.compression_enabled_algorithms_bitset", 1 << grpc.Compression.NoCompression),
        # Of more than 1,000 calls that are not taken yet gRPC cancels some, and all that are not taken in 30 s, without
        # a word: they are for us to refuse.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
        # Of each port. More are closed at once; without a bound they take the descriptors of all else.
        ("grpc.max_allowed_incoming_connections", num_descriptors() // _PORT_SHARE),
        ("grpc.so_reuseport", 0),  # a second process must not bind the same port silently
    )
    return grpc.aio.server(interceptors=tuple(interceptors), options=options)


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Listen on "host:port" (port 0: the system chooses) and return the port. Without `credentials` in plain text.
    Raises AddressInUse or ListenError."""
    listening_socket(address).close()  # gRPC would say it over many lines on stderr, and name no errno
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ListenError(f"cannot listen on {address}: {str(error).splitlines()[0]}") from None
    if not port:
        raise ListenError(f"cannot listen on {address}")
    return port


def listening_socket(address: str, backlog: int = 1) -> socket.socket:
    """Listen on "host:port" (port 0: the system chooses). Raises AddressInUse or ListenError."""
    try:
        host, port = split_address(address)
    except AddressError as error:
        raise ListenError(str(error)) from None
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(where)
            listener.listen(backlog)
        except BaseException:
            listener.close()
            raise
    except socket.gaierror as error:
        raise ListenError(f"cannot listen on {address}: {host}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{address} is in use: stop what listens there or choose another address") from None
        raise ListenError(f"cannot listen on {address}: {error.strerror}") from None
    return listener


class Health(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 with a Watch that streams every change. "" is the process, other names are services.

    Belongs to the server's event loop: call `set` from there."""

    def __init__(self, server: grpc.aio.Server):
        self._status: dict[str, int] = {"": _NOT_SERVING}
        self._changed = asyncio.Event()
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def set(self, service: str, serving: bool) -> None:
        """Say whether `service` serves; notify those who watch it."""
        status = _SERVING if serving else _NOT_SERVING
        if self._status.get(service) != status:
            self._status[service] = status
            self._changed.set()
            self._changed = asyncio.Event()

    def shut_down(self) -> None:
        """Nothing serves any more: call it before draining."""
        for service in tuple(self._status):
            self.set(service, False)

    async def Check(self, request, context) -> health_pb2.HealthCheckResponse:
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request, context) -> health_pb2.HealthListResponse:  # pyright: ignore[reportAttributeAccessIssue]
        named = {service: health_pb2.HealthCheckResponse(status=status) for service, status in self._status.items()}
        return health_pb2.HealthListResponse(statuses=named)  # pyright: ignore[reportAttributeAccessIssue]

    async def Watch(self, request, context) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        reported = None
        while True:
            changed, status = self._changed, self._status.get(request.service, _SERVICE_UNKNOWN)
            if status != reported:
                reported = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()


def enable_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Let tools list `service_names` (full names), health and reflection itself."""
    names = (*service_names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def num_descriptors() -> int:
    """Return how many this process may have open. Unlimited: more than a million."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if 0 <= soft < 1 << 20 else 1 << 20


def _raise_descriptors() -> None:
    """A connection takes one: as many as the system allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # a hard limit beyond what the kernel would set now
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if num_descriptors() < _FEW_DESCRIPTORS:
        log.warning(
            "few descriptors: raise the hard limit, ulimit -Hn %s",
            fields(limit=num_descriptors(), wanted=_FEW_DESCRIPTORS),
        )


def run(main: Callable[[asyncio.Event], Awaitable[int | None]], *, use_uvloop: bool = False) -> int:
    """Run `main(stop)` to its end and return its exit status (None is 0).

    The first SIGINT or SIGTERM sets `stop`: drain and return. The second one kills the process, unless it has a
    keeper."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # prompts are in memory
    _raise_descriptors()
    loop_factory = None
    if use_uvloop:
        import uvloop

        loop_factory = uvloop.new_event_loop
    # What `main` raises holds calls and channels, in circles, and with them gRPC's thread: alive when the interpreter
    # ends, it was seen to abort the process ("terminate called without an active exception", 2 of 14 ends on a busy
    # machine).
    atexit.register(gc.collect)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_with_signals(main)) or 0


async def until_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return what `work` does; None once it has ended where `stop` came first, by which it is cancelled. Raises what it
    raises, but what it raises while it is cancelled goes to the log."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        is_cancelled = working.cancel()
        stopping.cancel()
        ended, _ = await asyncio.gather(working, stopping, return_exceptions=True)
        if is_cancelled and isinstance(ended, Exception):
            log.warning("failed as it was told to end %s", fields(error=f"{type(ended).__name__}: {ended}"))


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[int | None]]) -> int | None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        stop.set()
        # A signal to all processes of a stack is followed by the keeper's own, which ends what does not drain by
        # SIGKILL.
        if KEEPER_VARIABLE in os.environ:
            return
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    return await main(stop)
