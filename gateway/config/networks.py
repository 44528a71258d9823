"""The networks in which workers may register: a gateway dials no address outside them for a worker."""

import ipaddress
import socket
from collections.abc import Sequence

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Networks:
    """A set of networks: `in` says whether an IP address, as text, is within one of them."""

    def __init__(self, cidrs: Sequence[str] = ()):
        """Allow these networks or, without any, this host alone, on any of its addresses. Raises ValueError, one
        line."""
        self._networks = [ipaddress.ip_network(cidr, strict=False) for cidr in cidrs]

    def __contains__(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        if self._networks:
            return any(address in network for network in self._networks)
        return address.is_loopback or _is_own(address)

    def __str__(self) -> str:
        return ",".join(map(str, self._networks)) or "this host alone"


def _is_own(address: _Address) -> bool:
    """Return whether an address is one of this host's: a socket can be bound to no other."""
    if address.is_unspecified or address.is_multicast:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
