"""Channels to other processes of the cluster."""

import grpc

from baton.service.net.server import MAX_MESSAGE_BYTES
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
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


def open_channel(target: str, access: Access = Access(), name: str = GATEWAY_NAME) -> grpc.aio.Channel:
    """A channel to `host:port`; it connects at the first call, and reconnects by itself within 2 s, with the
    certificates that were there when it was opened. `name`: as Access.channel. Raises OSError."""
    return access.channel(target, _OPTIONS, name)
