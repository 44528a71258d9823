"""The ports of a gateway: one for clients, which bring keys; one for workers and operators, which bring certificates.
Both lead to the same server, and the guard decides which calls are allowed."""

from typing import NamedTuple

import grpc

from baton.service.net import server as grpc_server
from baton.service.security.call_slots import CallSlots
from baton.service.security.credentials import Credentials
from baton.service.security.guard import Guard
from gateway.config.settings import GatewaySettings
from gateway.queue.quotas import Quotas

# Larger messages are gRPC's to refuse; up to here validation.py does it, with the field's name.
MAX_MESSAGE_BYTES = 4 << 20
_SPARE_CALLS = 64  # beyond the requests at once, for what is none and for refusals in admission's words


class Ports(NamedTuple):
    """A server and what it is bound to. `fleet_port` None: there is one port for all."""

    server: grpc.aio.Server
    port: int
    fleet_port: int | None
    guard: Guard


def open_ports(settings: GatewaySettings, quotas: Quotas) -> Ports:
    """Bind the ports and return their server, which is not started. Raises SettingsError, ListenError: one line
    each."""
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
