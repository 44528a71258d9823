"""Names by which HTTP requests may ask this host.

A request must name this host: by an address, by a name of loopback, by what is listened on, or by a name that the
operator gave. A page from elsewhere, open in an operator's browser, can make its own name lead here, and could read
all.
"""

import ipaddress
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


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
        return name in self._names or _is_address(name.strip("[]"))


class HostCheck:
    """Refuse requests that name another host, where no key is asked for: a page from elsewhere, open in a browser on
    this host, can make its own name lead here, and would read all answers."""

    def __init__(self, app: ASGIApp, names: HostNames, refuse: Callable[[str, str], Response]):
        """`refuse`: from the host that was named, "" for none or several, and the path to what is answered."""
        self._app, self._names, self._refuse = app, names, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = Headers(scope=scope).getlist("host")
        if (len(hosts) == 1 and hosts[0] in self._names) or (not hosts and scope["http_version"] == "1.0"):
            return await self._app(scope, receive, send)
        await self._refuse(hosts[0] if len(hosts) == 1 else "", scope["path"])(scope, receive, send)


def without_port(host: str) -> str:
    """Return the name in lower case: of "Gateway.example:9464", of "[::1]:9464"."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() else host.lower()


def _is_address(text: str) -> bool:
    """Return whether it is one; not with a zone, which may be any text and would go on into headers and pages."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text
