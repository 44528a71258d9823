"""How a gateway is reached: TLS, a key, and the settings of channels."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

SERVICE = "/baton.v1.Inference/"

# A frozen gateway or a cut cable is noticed 6 to 8 s after the last byte. `keepalive_timeout_ms` alone has no effect in
# today's grpcio: the ping timeout of HTTP/2 rules. Gateways permit pings every second.
_OPTIONS: tuple[tuple[str, object], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),  # the time that a connection may take
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", -1),
)


@dataclass(frozen=True)
class ConnectionSettings:
    """Plain text and no key where nothing is given."""

    api_key: str | None = None
    tls_ca: str | Path | None = None
    tls_cert: str | Path | None = None
    tls_key: str | Path | None = None
    tls_server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_cert is not None and self.tls_ca is None):
            raise ValueError("tls_cert, tls_key and tls_ca go together")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For every call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    @property
    def options(self) -> Sequence[tuple[str, object]]:
        """Return the settings of a channel."""
        name = self.tls_server_name
        return _OPTIONS if name is None else (*_OPTIONS, ("grpc.ssl_target_name_override", name))

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return what a TLS channel needs, of the files as they are now; None: plain text. Raises OSError."""
        if self.tls_ca is None:
            return None
        key, chain = (None if file is None else Path(file).read_bytes() for file in (self.tls_key, self.tls_cert))
        return grpc.ssl_channel_credentials(Path(self.tls_ca).read_bytes(), key, chain)
