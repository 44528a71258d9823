"""TLS between Baton's processes: certificates carry roles, and are read again when their files change.

A certificate names its holder's role by DNS names below `baton.internal`: `gateway.`, `prefill.`, `decode.`, `rank.`
and `operator.baton.internal`; every worker is also `worker.baton.internal`. Servers read the caller's role from it.
Callers check the name of the role they mean to reach, not the server's address, which changes with containers."""

import functools
import ssl
from collections.abc import Mapping
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
    """PEM files: the process's certificate chain, its key, and the authority that both sides trust."""

    cert: Path
    key: Path
    ca: Path

    def check(self) -> None:
        """Check that the files can be read and belong together. Raises SettingsError that names the file."""
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
        """Return the credentials of a gRPC port. The files are checked at every handshake: new connections see new
        certificates, open ones continue. Files that do not match, as during a rotation, are ignored."""
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
        """Return the context of a port that is not gRPC's and asks for no certificate. The files are checked at every
        handshake."""
        files, shown = _files(self), None
        first = current = self._context()

        def changed(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            nonlocal shown, current
            try:
                if (found := files.read()) is not shown:
                    shown, current = found, self._context()
            except (OSError, ssl.SSLError):  # the files are being replaced
                pass
            connection.context = current

        first.sni_callback = changed  # called for every handshake, with a name or without
        return first

    def channel(self) -> grpc.ChannelCredentials:
        """Return the credentials of one channel, from the files as they are now or as they last matched. Raises
        OSError."""
        found = _files(self).read()
        return grpc.ssl_channel_credentials(found.ca, found.key, found.cert)

    def ends_at(self) -> float:
        """Return when the certificate that is shown now ends, in seconds since 1970. Raises OSError, ValueError."""
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
        """Return the contents, the same object until they change. Raises OSError if the files have never been read."""
        try:
            stamps = self._stamps()
            if self._last is not None and self._last.stamps == stamps:
                return self._last
            found = _Contents(
                self._tls.ca.read_bytes(), self._tls.key.read_bytes(), self._tls.cert.read_bytes(), stamps
            )
            # else they are being replaced, and the next handshake checks again
            if self._fit() and self._stamps() == stamps:
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
    """Return the one _Files of all channels and ports, so that they share the contents that last matched."""
    return _Files(tls)


@functools.lru_cache(maxsize=8)
def end_of(certificate: bytes) -> float:
    """Return when a certificate ends, in seconds since 1970; for a chain in PEM, its first. Raises ValueError."""
    from cryptography import x509  # takes a tenth of a second and 11 MB, which processes without certificates save

    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def roles_of(auth_context: Mapping[str, list[bytes]]) -> frozenset[str]:
    """Return the roles in the caller's certificate, which the handshake has verified; empty without a certificate."""
    names = {name.decode(errors="replace") for name in auth_context.get(_SAN, ())}
    return frozenset(role for role in ROLES if f"{role}.{DOMAIN}" in names)
