"""Names by which HTTP requests may ask this host.

A request must name this host: by an address, by a name of loopback, by what is listened on, or by a name that the
operator gave. A page from elsewhere, open in an operator's browser, can make its own name lead here, and could read all.
"""

import ipaddress
from collections.abc import Iterable


class HostNames:
    """The names of one port; `"gateway.example:9464" in names` looks at a Host header."""

    def __init__(self, names: Iterable[str] = ()):
        self._names = {"localhost", *(name.lower() for name in names)}

    def add(self, name: str) -> None:
        """Accept one more."""
        self._names.add(name.lower())

    def __contains__(self, host: str) -> bool:
        """An address always is one: what a stranger can make lead here is a name."""
        name = without_port(host)
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._names
        return True


def without_port(host: str) -> str:
    """Return the name in lower case: of "Gateway.example:9464", of "[::1]:9464"."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() else host.lower()
