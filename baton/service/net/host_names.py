"""Host names under which this process may be asked over HTTP.

The Host header must hold an IP address, a name of loopback, the name of the listening address, or a name that the
operator gave. Otherwise a page from elsewhere, open in an operator's browser, could make its own name resolve to this
host and read every answer (DNS rebinding)."""

import ipaddress
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


class HostNames:
    """The names of one port; `"gateway.example:9464" in names` checks a Host header."""

    def __init__(self, names: Iterable[str] = ()):
        self._names = {"localhost", *(name.lower() for name in names)}

    def add(self, name: str) -> None:
        """Accept another name."""
        self._names.add(name.lower())

    def __contains__(self, host: str) -> bool:
        """Return whether a Host header is accepted. An IP address always is: a stranger can only make a name resolve to
        this host."""
        name = without_port(host)
        return name in self._names or _is_address(name.strip("[]"))


class HostCheck:
    """Refuse requests for another host on ports without keys, against DNS rebinding: a page in a browser on this host
    could make its own name resolve to this host and read every answer."""

    def __init__(self, app: ASGIApp, names: HostNames, refuse: Callable[[str, str], Response]):
        """Call `refuse(host, path)` for the response to a refused request; `host` is "" if the request names none or
        several."""
        self._app, self._names, self._refuse = app, names, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = Headers(scope=scope).getlist("host")
        if (len(hosts) == 1 and hosts[0] in self._names) or (not hosts and scope["http_version"] == "1.0"):
            return await self._app(scope, receive, send)
        await self._refuse(hosts[0] if len(hosts) == 1 else "", scope["path"])(scope, receive, send)


def without_port(host: str) -> str:
    """Return a Host header in lower case without its port, as for "Gateway.example:9464" or "[::1]:9464"."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() else host.lower()


def _is_address(text: str) -> bool:
    """Return whether it is one; not with a zone, which may be any text and would go on into headers and pages."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text
