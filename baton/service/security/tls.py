"""TLS between our processes: certificates that carry roles, read again whenever their files change.

A certificate says what its holder is by DNS names below `baton.internal`: `gateway.`, `prefill.`, `decode.`, `rank.`
and `operator.baton.internal`; every worker is `worker.baton.internal` too. Servers read the caller's role from it, and
callers hold a server to the name of what they meant to reach, not to its address, which containers change.
"""

import functools
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.service.file_stamp import file_stamp
from baton.service.settings import SettingsError

DOMAIN = "baton.internal"
GATEWAY, PREFILL, DECODE, RANK, OPERATOR = ROLES = ("gateway", "prefill", "decode", "rank", "operator")
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
        """For a port. The files are looked at with every handshake: new connections see new certificates, open
        ones continue. Files that do not fit together, as amid a rotation, change nothing."""
        files = _files(self)
        shown = files.read()

        def changed() -> grpc.ServerCertificateConfiguration | None:  # called by gRPC's own threads
            nonlocal shown
            if (found := files.read()) is shown:
                return None
            shown = found
            return found.configuration()

        return grpc.dynamic_ssl_server_credentials(
            shown.configuration(),
            changed,  # pyright: ignore[reportArgumentType]  None: nothing has changed
            require_certificate,
        )

    def context(self) -> ssl.SSLContext:
        """For a port that is not gRPC's, and asks for no certificates. The files are looked at with every handshake."""
        files, shown = _files(self), None
        first = current = self._context()

        def changed(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            nonlocal shown, current
            try:
                if (found := files.read()) is not shown:
                    shown, current = found, self._context()
            except (OSError, ssl.SSLError):  # they are being replaced
                pass
            connection.context = current

        first.sni_callback = changed  # called for every handshake, with a name or without
        return first

    def channel(self) -> grpc.ChannelCredentials:
        """For one channel, of the files as they are now, or as they were when they last fitted together. Raises
        OSError."""
        found = _files(self).read()
        return grpc.ssl_channel_credentials(found.ca, found.key, found.cert)

    def ends_at(self) -> float:
        """Return when the certificate that is shown now ends, as `end_of` does. Raises OSError, ValueError."""
        return end_of(_files(self).read().cert)

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self.cert, self.key)
        return context

    def _verify(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        context.load_verify_locations(self.ca)


@dataclass(frozen=True, eq=False)
class _Contents:
    ca: bytes
    key: bytes
    cert: bytes
    stamps: tuple

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)


class _Files:
    """The contents of the files when they last matched each other."""

    def __init__(self, tls: Tls):
        self._tls = tls
        self._last: _Contents | None = None

    def read(self) -> _Contents:
        """The same object until they change. Raises OSError where they have never been read."""
        try:
            stamps = self._stamps()
            if self._last is not None and self._last.stamps == stamps:
                return self._last
            found = _Contents(
                self._tls.ca.read_bytes(), self._tls.key.read_bytes(), self._tls.cert.read_bytes(), stamps
            )
            if self._fit() and self._stamps() == stamps:  # else they are being replaced: the next handshake looks again
                self._last = found
            return self._last or found
        except OSError:
            if self._last is None:
                raise
            return self._last

    def _fit(self) -> bool:
        try:
            self._tls._verify()
        except ssl.SSLError:
            return False
        return True

    def _stamps(self) -> tuple:
        return tuple(map(file_stamp, (self._tls.cert, self._tls.key, self._tls.ca)))


@functools.cache
def _files(tls: Tls) -> _Files:
    """One for all channels and ports, so that each knows what the others have seen fit together."""
    return _Files(tls)


@functools.lru_cache(maxsize=8)
def end_of(certificate: bytes) -> float:
    """Return when a certificate ends, in seconds since 1970; of a chain in PEM its first. Raises ValueError."""
    from cryptography import x509  # a tenth of a second, and 11 MB, which processes without certificates do without

    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def roles_of(auth_context: Mapping[str, list[bytes]]) -> frozenset[str]:
    """The roles in the caller's certificate, which the handshake has verified; none without one."""
    names = {name.decode(errors="replace") for name in auth_context.get(_SAN, ())}
    return frozenset(role for role in ROLES if f"{role}.{DOMAIN}" in names)


ChannelSecurity = Callable[[], grpc.ChannelCredentials | None]
"""Credentials for a channel that is opened now; None: plain text."""
