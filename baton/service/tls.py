"""TLS between our processes: certificates that carry roles, read again whenever their files change.

A certificate says what its holder is by DNS names below `baton.internal`: `gateway.`, `prefill.`, `decode.` and
`operator.baton.internal`; every worker is `worker.baton.internal` too. Servers read the caller's role from it, and
callers hold a server to the name of what they meant to reach, not to its address, which containers change.
"""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from baton.service.settings import SettingsError

DOMAIN = "baton.internal"
GATEWAY, PREFILL, DECODE, OPERATOR = ROLES = ("gateway", "prefill", "decode", "operator")
WORKER_NAME, GATEWAY_NAME = f"worker.{DOMAIN}", f"gateway.{DOMAIN}"
_SAN = "x509_subject_alternative_name"


@dataclass(frozen=True)
class Tls:
    """PEM files: the own certificate chain, its key, and the authority that both sides trust."""

    cert: Path
    key: Path
    ca: Path

    def check(self) -> None:
        """Raises SettingsError naming the file, for what cannot be read or does not belong together."""
        for flag, path in (("--tls-cert", self.cert), ("--tls-key", self.key), ("--tls-ca", self.ca)):
            try:
                path.read_bytes()
            except OSError as error:
                raise SettingsError(f"{flag} {path}: {error.strerror}") from None
        try:
            self._verify()
        except ssl.SSLError as error:
            reason = error.reason or "no PEM"
            raise SettingsError(f"--tls-cert {self.cert}, --tls-key {self.key}, --tls-ca {self.ca}: {reason}") from None

    def server(self, require_certificate: bool) -> grpc.ServerCredentials:
        """For a port. The files are looked at with every handshake: new connections see new certificates, those that
        stand go on. Files that do not fit together, as amid a rotation, change nothing."""
        reader = _Reader(self)
        return grpc.dynamic_ssl_server_credentials(reader.read(), reader.changed, require_certificate)

    def channel(self) -> grpc.ChannelCredentials:
        """For one channel, of the files as they are now."""
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes())

    def _verify(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        context.load_verify_locations(self.ca)


@dataclass
class _Reader:
    """Called by gRPC's own threads, at each handshake."""

    tls: Tls
    stamps: tuple = field(default=())

    def read(self) -> grpc.ServerCertificateConfiguration:
        self.stamps = self._stamps()
        pair = (self.tls.key.read_bytes(), self.tls.cert.read_bytes())
        return grpc.ssl_server_certificate_configuration((pair,), self.tls.ca.read_bytes())

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            if self._stamps() == self.stamps:
                return None
            self.tls._verify()
            return self.read()
        except (OSError, ssl.SSLError):
            return None

    def _stamps(self) -> tuple:
        found = (path.stat() for path in (self.tls.cert, self.tls.key, self.tls.ca))
        return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in found)


def roles_of(auth_context: Mapping[str, list[bytes]]) -> frozenset[str]:
    """The roles in the caller's certificate, which the handshake has verified; none without one."""
    names = {name.decode(errors="replace") for name in auth_context.get(_SAN, ())}
    return frozenset(role for role in ROLES if f"{role}.{DOMAIN}" in names)


ChannelSecurity = Callable[[], grpc.ChannelCredentials | None]
"""Credentials for a channel that is opened now; None: plain text."""
