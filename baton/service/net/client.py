"""gRPC channels to other processes of the cluster, and explanations of why a call failed."""

import re
import socket
import ssl
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.addresses import split_address
from baton.service.logs import printable
from baton.service.net.server import MAX_MESSAGE_BYTES
from baton.service.security.access import Access
from baton.service.security.tls import GATEWAY_NAME, end_of

# A frozen peer is noticed in 3 to 5 s. `keepalive_timeout_ms` alone has no effect in today's grpcio: the ping timeout
# of HTTP/2 rules. Servers permit a ping each second (server.py); otherwise keepalive would end healthy streams.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The time that a connection may take, TLS included: with 100 ms the first call of `baton scale` failed on a busy
    # host.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
_PROBE_S = 2.0
_TLS_OF_BOTH, _NO_HOST = "TLS for certificates", "no host"


def open_channel(target: str, access: Access = Access(), name: str = GATEWAY_NAME) -> grpc.aio.Channel:
    """Return a channel to `host:port`. It connects at the first call, reconnects within 2 s, and uses the certificates
    that exist now. `name` is that of Access.channel. Raises OSError."""
    return access.channel(target, _OPTIONS, name)


async def connect(channel: grpc.aio.Channel) -> None:
    """Wait until a channel is connected. Raises AioRpcError if it cannot connect. Callers that retry a stream use this
    first: each stream that is opened on a channel which cannot connect leaks 200 to 550 bytes (grpc/grpc#43360)."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            await _raise_failure(channel)
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


async def _raise_failure(channel: grpc.aio.Channel) -> None:
    """Raise the AioRpcError that says why a channel failed to connect, unless it has connected since."""
    stub: Any = health_pb2_grpc.HealthStub(channel)  # the generated types do not name its methods
    try:
        await stub.Check(health_pb2.HealthCheckRequest())  # fails immediately, and leaks nothing
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise


def explain_failure(target: str, code: grpc.StatusCode, details: str | None, access: Access) -> str:
    """Return one line for people on why a call to `target` failed: what to do if nothing listens there or the access
    settings do not match, else the status. It takes up to 4 s."""
    spoken = _probe(target) if code is grpc.StatusCode.UNAVAILABLE else ""
    if spoken == "nothing":
        return f"nothing listens at {target}: is `baton up` running?"
    if wrong := _wrong_access(spoken, code, details, access):
        return f"{target} {': '.join(wrong)}"
    return f"{target}: {code.name}: {printable(str(details))}"


def wrong_access(target: str, code: grpc.StatusCode, details: str | None, access: Access) -> tuple[str, str] | None:
    """Return which setting of `access` made a call to `target` fail and what to do; None if the cause is another. It
    takes up to 4 s."""
    return _wrong_access(_probe(target) if code is grpc.StatusCode.UNAVAILABLE else "", code, details, access)


def _wrong_access(spoken: str, code: grpc.StatusCode, details: str | None, access: Access) -> tuple[str, str] | None:
    pair = "--tls-cert and --tls-key"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        if access.tls_cert is not None:
            keys = "clients' keys count there (--api-key-file)"
            return (
                "does not look at certificates",
                f"{keys}; operators' certificates count at the address that `baton up` calls fleet=",
            )
        return (
            f"says {code.name}, {printable(str(details))}",
            f"give a valid --api-key-file, or {pair} at the address that `baton up` calls fleet=",
        )
    if spoken.startswith("TLS") and access.tls_ca is None:
        also = f", and {pair}" if spoken == _TLS_OF_BOTH else ""
        return "speaks TLS", f"give --tls-ca with the certificate of its authority{also}"
    if spoken == _TLS_OF_BOTH and access.tls_cert is None:
        return "asks for a certificate", f"give {pair}, as `baton certs` makes them for operators"
    if spoken == "plain text" and access.tls_ca is not None:
        return "speaks no TLS", "leave --tls-ca out, or correct the address"
    if spoken == _NO_HOST:
        return "has a host name that is not known here", "correct it, or the DNS of this host"
    return _wrong_handshake(details or "", access) if spoken.startswith("TLS") else None


def _wrong_handshake(details: str, access: Access) -> tuple[str, str] | None:
    """Return what failed in a TLS handshake, as far as gRPC's message tells."""
    if "Hostname Verification Check failed" in details:
        if access.tls_cert is not None:  # then the server must show a role, not a host name
            return "shows the certificate of another role", "correct the address"
        return (
            "shows a certificate without this name",
            "`baton certs --out NEW --renew DIR --host HOST` makes one with it",
        )
    if "CERTIFICATE_VERIFY_FAILED: certificate has expired" in details:
        return "shows a certificate that has expired", "renew it there, and look at both clocks"
    if found := re.search("CERTIFICATE_VERIFY_FAILED: ([a-z ]+)", details):
        return f"shows a certificate that --tls-ca does not prove ({found[1]})", "give the ca.crt of its authority"
    if "Failed to create security handshaker" in details:
        files = "--tls-ca" if access.tls_cert is None else "--tls-ca, --tls-cert and --tls-key"
        return f"cannot be asked with {files}", "give PEM files, a key that belongs to its certificate"
    return None


def _probe(target: str) -> str:
    """Return what `target` speaks (TLS, TLS for certificates alone, plain text, nothing), or that it is unknown."""
    try:
        with socket.create_connection(split_address(target), timeout=_PROBE_S) as sock:
            try:
                tls = _to_any().wrap_socket(sock)
            except OSError:  # also raised if the server waits for more of another protocol
                return "plain text"
            with tls:
                return "TLS" if _is_greeted(tls) else _TLS_OF_BOTH
    except socket.gaierror:
        return _NO_HOST
    except (OSError, ValueError):
        return "nothing"


def certificate_end(target: str) -> float | None:
    """Return when the certificate at `target` ends, in seconds since 1970; None if it cannot be read. It takes up to 2
    s."""
    try:
        with (
            socket.create_connection(split_address(target), timeout=_PROBE_S) as sock,
            _to_any().wrap_socket(sock) as tls,
        ):
            return end_of(ssl.DER_cert_to_PEM_cert(tls.getpeercert(True) or b"").encode())
    except (OSError, ValueError):
        return None


def _to_any() -> ssl.SSLContext:
    """Return a context that trusts every server, for a look at a server to which nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _is_greeted(tls: ssl.SSLSocket) -> bool:
    """Return whether the server continues with a client that shows no certificate: in HTTP/2 the server speaks
    first."""
    try:
        return bool(tls.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False
