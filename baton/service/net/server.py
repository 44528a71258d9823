"""Run an object as a gRPC process: server options, binding with one clear error line, health, reflection, signals."""

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
from baton.service.fatal import exit_at_once
from baton.service.logs import fields

MAX_MESSAGE_BYTES = 16 << 20  # between Baton's own processes: the ids of the longest prompt fit
MAX_METADATA_BYTES = 8192
MAX_PENDING_CALLS = 16_384
MAX_PENDING_S = 3600  # the longest deadline of a request; each call ends at its own
HANDSHAKE_S = 5.0  # for TLS and HTTP/2's first frames; gRPC's own is 120 s
IDLE_S = 300.0  # for a connection without calls
_FEW_DESCRIPTORS = 8192
_PORT_SHARE = 3  # a port takes a third of the descriptors: workers, Redis and files share the rest
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

T = TypeVar("T")

log = logging.getLogger(__name__)


class ListenError(Exception):
    """The address cannot be bound; the message is one line."""


class AddressInUse(ListenError):
    """Another process listens on the address."""


def make_server(
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """Return a server that accepts our clients' keepalive and refuses messages above `max_message_bytes`."""
    options = (
        # Clients ping every 2 s; gRPC's default minimum would answer healthy streams with GOAWAY too_many_pings.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 10_000),  # finds clients that vanished without a FIN
        ("grpc.http2.ping_timeout_ms", 5000),
        ("grpc.http2.max_pings_without_data", 0),
        # Between a soft and a higher hard limit gRPC would refuse some calls and accept others.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),  # already computed: the receiver has its own bound
        # gRPC expands a whole message before it compares its length: 8 KiB that become 8 MiB take 15 ms on the one
        # thread that all calls share. So compressed messages are refused by their headers.
        ("grpc.compression_enabled_algorithms_bitset", 1 << grpc.Compression.NoCompression),
        # By default gRPC silently cancels some calls when more than 1,000 wait to be taken, and each call that waits
        # for 30 s. Refusals are to be ours.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
        # Per port. Further connections are closed immediately; without a bound they would take all descriptors.
        ("grpc.max_allowed_incoming_connections", num_descriptors() // _PORT_SHARE),
        ("grpc.so_reuseport", 0),  # a second process must not silently bind the same port
    )
    return grpc.aio.server(interceptors=tuple(interceptors), options=options)


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Listen on "host:port" (port 0: the system chooses) and return the port. Without `credentials` the port speaks
    plain text. Raises AddressInUse or ListenError."""
    listening_socket(address).close()  # gRPC would report a failure over many lines on stderr, without errno
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ListenError(f"cannot listen on {address}: {str(error).splitlines()[0]}") from None
    if not port:
        raise ListenError(f"cannot listen on {address}")
    return port


async def start(server: grpc.aio.Server) -> None:
    """Start `server`. The process ends with status 1 if the server fails, so that its keeper starts it again: gRPC
    closes the ports for good then, and the process looks well."""
    await server.start()
    ended = asyncio.create_task(server.wait_for_termination(), name="end of the gRPC server")
    ended.add_done_callback(_exit_if_failed)


def _exit_if_failed(ended: asyncio.Task[bool]) -> None:
    if not ended.cancelled() and (error := ended.exception()) is not None:
        exit_at_once(f"the gRPC server has failed, so this process ends: {error!r}")


def listening_socket(address: str, backlog: int = 1) -> socket.socket:
    """Return a socket that listens on "host:port" (port 0: the system chooses). Raises AddressInUse or ListenError."""
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
    """grpc.health.v1 with a Watch that streams every change. The name "" stands for the process, other names for
    services.

    Belongs to the server's event loop: call `set` from there."""

    def __init__(self, server: grpc.aio.Server):
        self._status: dict[str, int] = {"": _NOT_SERVING}
        self._changed = asyncio.Event()
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def set(self, service: str, serving: bool) -> None:
        """Set whether `service` serves, and notify the watchers."""
        status = _SERVING if serving else _NOT_SERVING
        if self._status.get(service) != status:
            self._status[service] = status
            self._changed.set()
            self._changed = asyncio.Event()

    def shut_down(self) -> None:
        """Report that nothing serves any more; call this before draining."""
        for service in tuple(self._status):
            self.set(service, False)

    async def Check(self, request, context) -> health_pb2.HealthCheckResponse:
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

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
    """Return how many descriptors this process may open; just over a million if the number is unlimited."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if 0 <= soft < 1 << 20 else 1 << 20


def _raise_descriptors() -> None:
    """Raise the limit of open files to the hard limit, since each connection takes one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # the hard limit may exceed what the kernel would set now
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if num_descriptors() < _FEW_DESCRIPTORS:
        log.warning(
            "few descriptors: raise the hard limit, ulimit -Hn %s",
            fields(limit=num_descriptors(), wanted=_FEW_DESCRIPTORS),
        )


def run(main: Callable[[asyncio.Event], Awaitable[int | None]], *, use_uvloop: bool = False) -> int:
    """Run `main(stop)` to its end and return its exit status (None is 0).

    The first SIGINT or SIGTERM sets `stop`, on which `main` drains and returns. A second one kills the process, unless
    a keeper runs it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # prompts are in memory
    _raise_descriptors()
    loop_factory = None
    if use_uvloop:
        import uvloop

        loop_factory = uvloop.new_event_loop
    # An exception from `main` holds calls and channels in reference cycles, and they hold gRPC's thread. If that is
    # alive when the interpreter exits, the process may abort ("terminate called without an active exception", 2 of 14
    # exits on a busy machine).
    atexit.register(gc.collect)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_with_signals(main)) or 0


async def until_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return the result of `work`, or None if `stop` is set first: then `work` is cancelled and awaited. Exceptions of
    `work` are raised, except those after its cancellation, which are logged."""
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
        # A signal that reaches all processes of a stack is followed by the keeper's own, and the keeper ends processes
        # that do not drain by SIGKILL.
        if KEEPER_VARIABLE in os.environ:
            return
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    return await main(stop)
