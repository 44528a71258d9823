"""Settings of gateways and workers about ports that other hosts can reach, and their protection."""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from baton.addresses import bare_host_of
from baton.options import option
from baton.service.security.tls import Tls


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """Settings that gateways and workers share; their settings inherit this class and call `check_exposure`."""

    tls_cert: Path | None = option(
        "PEM file with this process's certificate; reloaded when it changes", None, metavar="FILE"
    )
    tls_key: Path | None = option("PEM file with the certificate's private key", None, metavar="FILE")
    tls_ca: Path | None = option(
        "PEM file with the authority that signs all certificates of the stack", None, metavar="FILE"
    )
    insecure: bool = option(
        "listen beyond loopback without TLS or credentials; anyone who reaches a port may use it", False
    )
    open_admin: bool = option("serve --admin beyond loopback, as plain HTTP that anyone who reaches it may read", False)
    admin_hosts: tuple[str, ...] = option(
        "host names, besides IP addresses and localhost, under which --admin, and a gateway's --http without keys, may be asked",
        (),
        metavar="NAME,...",
    )
    reflection: bool | None = option(
        "allow gRPC reflection to authenticated callers (default: on loopback without TLS and keys)", None
    )

    @property
    def tls(self) -> Tls | None:
        return Tls(self.tls_cert, self.tls_key, self.tls_ca) if self.tls_cert and self.tls_key and self.tls_ca else None

    def has_reflection(self, is_private: bool) -> bool:
        """Return whether reflection is served. `is_private`: only this host reaches the port, without a key."""
        return is_private if self.reflection is None else self.reflection

    def check_exposure(self, listens: Mapping[str, str], admin: str, is_protected: bool, needs: str) -> None:
        """Check that ports beyond loopback are protected. `listens` maps flags to addresses; `is_protected` says
        whether what `needs` names is configured. Raises ValueError, one line."""
        given = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
        if missing and len(missing) < len(given):
            raise ValueError(f"{missing[0]} is missing: --tls-cert, --tls-key and --tls-ca go together")
        if self.insecure:
            return
        for flag, address in listens.items():
            if not is_protected and not is_loopback(address):
                raise ValueError(f"{flag} {address}: beyond loopback this needs {needs}; or say --insecure")
        if not self.open_admin and not is_loopback(admin):
            raise ValueError(f"--admin {admin}: is plain HTTP, open to all that reach it; or say --open-admin")


def is_loopback(address: str) -> bool:
    """Return whether only this host can reach HOST:PORT."""
    host = bare_host_of(address)
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # another name, even 127.example.org, is wherever its DNS says
