"""Secure KV that travels over gRPC."""

from baton.service.security.guard import Guard
from baton.service.security.tls import WORKER_NAME, Tls
from kvtransfer.transports.grpc_stream import Security


def kv_security(tls: Tls | None, guard: Guard) -> Security:
    """Return credentials by which both sides show certificates and a source accepts only workers; without `tls`, plain
    text."""
    if tls is None:
        return Security(interceptors=(guard,))
    return Security(tls.server(True), (guard,), tls.channel, WORKER_NAME)
