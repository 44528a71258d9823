"""Settings by which a caller reaches a server: trusted authorities, its own certificate or key."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import grpc

from baton.service.security.tls import GATEWAY_NAME, Tls
from baton.service.settings import SettingsError

_FLAGS = (
    ("tls_ca", "authority of the server's certificate: speak TLS"),
    ("tls_cert", "own certificate, for the gateway's --fleet-listen and for workers"),
    ("tls_key", "its key"),
    ("api_key_file", "file with the API key"),
)

ChannelOptions = tuple[tuple[str, object], ...]


class _KeyFile:
    """Return the key that is in a file now when called; while the file is being written, the previous key."""

    def __init__(self, path: Path):
        """Read the file. Raises OSError."""
        self._path, self._key = path, path.read_text().strip()

    def __call__(self) -> str:
        with contextlib.suppress(OSError):
            self._key = self._path.read_text().strip() or self._key
        return self._key


@dataclass(frozen=True)
class Access:
    """What a caller trusts and shows. Without any file it speaks plain text and shows no credential."""

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    api_key_file: Path | None = None

    @overload
    def channel(self, target: str, options: ChannelOptions = (), name: str = GATEWAY_NAME) -> grpc.aio.Channel: ...
    @overload
    def channel(
        self, target: str, options: ChannelOptions = (), name: str = GATEWAY_NAME, *, blocking: Literal[True]
    ) -> grpc.Channel: ...
    def channel(self, target: str, options: ChannelOptions = (), name: str = GATEWAY_NAME, *, blocking: bool = False):
        """Return a channel to `host:port` with the files as they are now. If we show a certificate, the server's must
        have `name`, else the host of `target`. Raises OSError."""
        kind = grpc if blocking else grpc.aio
        options = (("grpc.enable_http_proxy", 0), *options)
        if self.tls_ca is None:
            return kind.insecure_channel(target, options=options)
        if self.tls_cert is None or self.tls_key is None:
            return kind.secure_channel(target, grpc.ssl_channel_credentials(self.tls_ca.read_bytes()), options=options)
        tls = Tls(self.tls_cert, self.tls_key, self.tls_ca)
        return kind.secure_channel(target, tls.channel(), options=(*options, ("grpc.ssl_target_name_override", name)))

    @property
    def api_key(self) -> str | None:
        """The key, read from the file now. Raises OSError."""
        return None if self.api_key_file is None else self.api_key_file.read_text().strip()

    def for_client(self) -> dict[str, Any]:
        """Return the arguments of a baton.client that say who calls; the key is read again for each attempt. Raises
        OSError."""
        return {
            "api_key": None if self.api_key_file is None else _KeyFile(self.api_key_file),
            "tls_ca": self.tls_ca,
            "tls_cert": self.tls_cert,
            "tls_key": self.tls_key,
            "tls_server_name": GATEWAY_NAME if self.tls_cert else None,
        }

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata for every call. Raises OSError."""
        key = self.api_key
        return () if key is None else (("authorization", f"Bearer {key}"),)


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """Add --tls-ca, --tls-cert, --tls-key and --api-key-file; each is also set by BATON_TLS_CA and so on."""
    group = parser.add_argument_group("a stack with TLS and credentials")
    for name, text in _FLAGS:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=Path, metavar="FILE", help=f"{text} (or BATON_{name.upper()})")


def read_access(args: argparse.Namespace) -> Access:
    """Return the access settings of flags and environment. Raises SettingsError, one line."""
    given = {name: getattr(args, name) or os.environ.get(f"BATON_{name.upper()}") for name, _ in _FLAGS}
    access = Access(**{name: Path(value) for name, value in given.items() if value})
    if (access.tls_cert is None) != (access.tls_key is None) or (access.tls_cert and not access.tls_ca):
        raise SettingsError("--tls-cert, --tls-key and --tls-ca go together")
    for name, value in vars(access).items():
        if value is not None:
            _check_is_readable(f"--{name.replace('_', '-')}", value)
    _check_key(access)
    return access


def _check_key(access: Access) -> None:
    """Check that the file holds one key. Raises SettingsError."""
    try:
        key = access.api_key
    except UnicodeDecodeError:
        key = ""
    # for instance the credentials file beside it, or a certificate
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise SettingsError(f"--api-key-file {access.api_key_file}: holds no key, which is one word of printable ASCII")


def _check_is_readable(flag: str, path: Path) -> None:
    """Check that the file can be read. Raises SettingsError."""
    try:
        path.open("rb").close()  # os.access also accepts a folder
    except OSError as error:
        raise SettingsError(f"{flag} {path}: cannot be read: {error.strerror}") from None
