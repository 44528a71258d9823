"""Channels to other processes of the cluster."""

import socket
import ssl
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.service.logs import printable
from baton.service.net.server import MAX_MESSAGE_BYTES, ListenError, split_address
from baton.service.security.access import Access
from baton.service.security.tls import GATEWAY_NAME

# A frozen peer is noticed in 3 to 5 s. `keepalive_timeout_ms` alone has no effect in today's grpcio: the ping timeout
# of HTTP/2 rules. Servers permit pings at least every second (server.py), else keepalive would end healthy streams.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The time that a connection may take, TLS included: with 100 ms the first call of `baton scale` failed on a busy host.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
_PROBE_S = 2.0


def open_channel(target: str, access: Access = Access(), name: str = GATEWAY_NAME) -> grpc.aio.Channel:
    """A channel to `host:port`; it connects at the first call, and reconnects by itself within 2 s, with the
    certificates that were there when it was opened. `name`: as Access.channel. Raises OSError."""
    return access.channel(target, _OPTIONS, name)


async def connect(channel: grpc.aio.Channel) -> None:
    """Return once a channel is connected. Raises AioRpcError where it cannot be. For who tries again and again to open a
    stream: each that is called on a channel which cannot connect leaks 200 to 550 bytes (grpc/grpc#43360)."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            await _raise_failure(channel)
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


async def _raise_failure(channel: grpc.aio.Channel) -> None:
    """Raises AioRpcError, which says why a channel has failed to connect, unless it has connected since."""
    stub: Any = health_pb2_grpc.HealthStub(channel)  # its types do not name its methods
    try:
        await stub.Check(health_pb2.HealthCheckRequest())  # fails at once, and leaks nothing
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise


def explain_failure(target: str, code: grpc.StatusCode, details: str | None, access: Access) -> str:
    """Return one line for people about a call to `target` that failed: what to do if nothing listens there or TLS is
    spoken on one side only, else the status. Takes up to 4 s."""
    if code is grpc.StatusCode.UNAVAILABLE:
        spoken = _probe(target)
        if spoken == "nothing":
            return f"nothing listens at {target}: is `baton up` running?"
        if spoken == "TLS" and access.tls_ca is None:
            return f"{target} speaks TLS: give --tls-ca with the certificate of its authority"
        if spoken == "plain text" and access.tls_ca is not None:
            return f"{target} speaks no TLS: leave --tls-ca out, or correct the address"
    if code is grpc.StatusCode.UNAUTHENTICATED and access.tls_cert is not None:
        return (
            f"{target} does not look at certificates: clients' keys count there (--api-key-file); "
            "operators' certificates count at the address that `baton up` calls fleet="
        )
    return f"{target}: {code.name}: {printable(str(details))}"


def _probe(target: str) -> str:
    """Return what is spoken there: TLS, plain text or nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(split_address(target), timeout=_PROBE_S) as sock:
            try:
                with context.wrap_socket(sock):
                    return "TLS"
            except OSError:  # also of a server that waits for the rest of something else
                return "plain text"
    except (OSError, ListenError, ValueError):
        return "nothing"
