"""How the client reaches a gateway: TLS, the key, and channel options."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

SERVICE = "/baton.v1.Inference/"

# A frozen gateway or a cut cable is noticed 6 to 8 s after the last byte. `keepalive_timeout_ms` alone has no effect in
# today's grpcio: the ping timeout of HTTP/2 rules. Gateways permit a ping each second.
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
    # Calls take turns over all gateways of a name, as of a headless Service. Such a channel would keep its connections
    # for half an hour without a call, and reopen those that gateways close as idle (300 s); it drops them within twice
    # this time. By default gRPC resolves a name again after 30 s at the earliest, but retries a call for about 7 s.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    ("grpc.client_idle_timeout_ms", 140_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
)


@dataclass(frozen=True)
class ConnectionSettings:
    """TLS files and API key of a client. Without any of them it speaks plain text and shows no key."""

    api_key: str | Callable[[], str] | None = None
    tls: bool = False
    tls_ca: str | Path | None = None
    tls_cert: str | Path | None = None
    tls_key: str | Path | None = None
    tls_server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_cert is not None and not self._speaks_tls):
            raise ValueError("tls_cert and tls_key go together, with tls_ca or tls")

    @property
    def _speaks_tls(self) -> bool:
        return self.tls or self.tls_ca is not None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a call that is sent now. Raises TypeError, ValueError."""
        return _authorization(self.api_key() if callable(self.api_key) else self.api_key)

    @property
    def options(self) -> Sequence[tuple[str, object]]:
        """The options of a channel."""
        name = self.tls_server_name
        return _OPTIONS if name is None else (*_OPTIONS, ("grpc.ssl_target_name_override", name))

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of a TLS channel, from the files as they are now; None for plain text. Raises
        OSError."""
        if not self._speaks_tls:
            return None
        files = (self.tls_ca, self.tls_key, self.tls_cert)
        return grpc.ssl_channel_credentials(*(None if file is None else Path(file).read_bytes() for file in files))


def _authorization(key: object) -> tuple[tuple[str, str], ...]:
    """Return the metadata for a key that the caller gave or whose function returned it. Raises TypeError,
    ValueError."""
    if key is None:
        return ()
    if not isinstance(key, str):
        raise TypeError(f"api_key: give a str, or a plain function that returns one, not a {type(key).__name__}")
    key = key.strip()  # key files end with a newline
    if not re.fullmatch("[!-~]+", key):  # gRPC would raise "Illegal header value" with its own stack
        raise ValueError("api_key: is no key: give one word of printable ASCII")
    return (("authorization", f"Bearer {key}"),)
