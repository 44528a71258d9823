"""Open the ports of a gateway: one for clients, which show keys, and one for workers and operators, which show
certificates. Both lead to the same server, whose guard decides which calls are allowed."""

from typing import NamedTuple

import grpc

from baton.service.net import server as grpc_server
from baton.service.security.call_slots import CallSlots
from baton.service.security.credentials import Credentials
from baton.service.security.guard import Guard
from gateway.config.settings import GatewaySettings
from gateway.queue.quotas import Quotas

# gRPC refuses larger messages; smaller ones are refused by validation.py, which names the field.
MAX_MESSAGE_BYTES = 4 << 20
_SPARE_CALLS = 64  # beyond the concurrent requests: for other calls, and for refusals with admission's reason


class Ports(NamedTuple):
    """A server and its ports. `fleet_port` None: one port serves all callers."""

    server: grpc.aio.Server
    port: int
    fleet_port: int | None
    guard: Guard


def open_ports(settings: GatewaySettings, quotas: Quotas) -> Ports:
    """Bind the ports and return their server, which is not started. Raises SettingsError and ListenError, with
    messages of one line."""
    tls = settings.tls
    if tls:
        tls.check()
    credentials = Credentials(settings.credentials) if settings.credentials else None
    slots = CallSlots(settings.max_concurrent_requests + _SPARE_CALLS, quotas.max_concurrent)
    guard = Guard(credentials, slots, is_open=credentials is None)
    server = grpc_server.make_server(max_message_bytes=MAX_MESSAGE_BYTES, interceptors=[guard])
    port = grpc_server.bind(server, settings.listen, tls and tls.server(require_certificate=False))
    fleet_port = None
    if settings.fleet_listen:
        fleet_port = grpc_server.bind(server, settings.fleet_listen, tls.server(require_certificate=True))
    return Ports(server, port, fleet_port, guard)
