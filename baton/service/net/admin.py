"""HTTP pages for operators, orchestrators and Prometheus: /healthz, /readyz, /metrics and pages that a process adds."""

import asyncio
import json
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.addresses import bare_host_of
from baton.service.net.host_names import HostCheck, HostNames, without_port
from baton.service.net.http_server import HttpServer, open_http
from baton.service.net.server import ListenError

_MAX_CONNECTIONS = 512  # few beside the descriptors that a process starts with
_UNREAD_S = 5.0  # for a client to read a page: those that do not could hold all connections for ever
_HEADERS = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))


class Page(NamedTuple):
    """A page of the admin port. `form` reads from a request all that the page depends on; `make` computes it from
    that."""

    make: Callable[[Any], Response]
    form: Callable[[Request], Hashable] = lambda request: None


class _SharedPage:
    """A page that is computed once for all requests for the same form that wait for it. One page is computed per turn
    of the event loop: 10,000 simultaneous requests had blocked everything else for a minute."""

    def __init__(self, page: Page, turn: asyncio.Lock):
        self._page, self._turn = page, turn
        self._to_be_made: dict[Hashable, asyncio.Future[Response]] = {}

    async def answer(self, request: Request) -> Response:
        """Return the next page that is computed, never one that was begun before this request."""
        form = self._page.form(request)
        if form not in self._to_be_made:
            self._to_be_made[form] = asyncio.ensure_future(self._make(form))
        return await asyncio.shield(self._to_be_made[form])  # one that leaves leaves the others theirs

    async def _make(self, form: Hashable) -> Response:
        async with self._turn:
            await asyncio.sleep(0)
            del self._to_be_made[form]
            return self._page.make(form)


class Admin:
    """The admin server. `readiness()` returns (ready, body of /readyz); `pages` are further paths; `hosts` are host
    names under which it may be asked."""

    def __init__(
        self,
        readiness: Callable[[], tuple[bool, dict]],
        pages: Mapping[str, Page],
        hosts: Collection[str] = (),
    ):
        async def healthz(request: Request) -> Response:
            return json_response({"status": "ok"})

        async def readyz(request: Request) -> Response:
            ready, body = readiness()
            return json_response(body, 200 if ready else 503)

        async def elsewhere(request: Request, raised: Exception) -> Response:
            if isinstance(raised, HTTPException) and raised.status_code == 405:
                return json_response({"error": "only GET"}, 405)
            return json_response({"error": f"here are {', '.join(sorted(served))}"}, 404)

        turn = asyncio.Lock()
        shared = {path: _SharedPage(page, turn).answer for path, page in pages.items()}
        served = {"/healthz": healthz, "/readyz": readyz, **shared}
        self._hosts = HostNames(hosts)
        self._app = Starlette(
            routes=[Route(path, page) for path, page in served.items()],
            middleware=[Middleware(HostCheck, names=self._hosts, refuse=_refuse_host)],
            exception_handlers={404: elsewhere, 405: elsewhere},
        )
        self._app.router.redirect_slashes = False
        self._server: HttpServer | None = None

    async def start(self, address: str) -> int:
        """Listen and return the port. Raises ListenError."""
        try:
            self._server = open_http(
                address,
                self._app,
                _refuse_head,
                headers=_HEADERS,
                max_connections=_MAX_CONNECTIONS,
                unread_s=_UNREAD_S,
            )
        except ListenError as error:
            raise ListenError(f"--admin: {error}") from None
        self._hosts.add(bare_host_of(address))
        self._server.start()
        return self._server.port

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()


def json_response(value: object, status: int = 200) -> Response:
    """Return one line of JSON."""
    return Response(json.dumps(value) + "\n", status, media_type="application/json")


def _refuse_host(host: str, path: str) -> Response:
    if not host:
        return json_response({"error": "a request names its Host once"}, 400)
    message = f"{without_port(host)[:100]} is not this host: --admin-hosts (of `baton up` --gateway.admin-hosts) lists its names"
    return json_response({"error": message}, 421)


def _refuse_head(is_too_large: bool, path: str) -> Response:
    return json_response(
        {"error": "the head is too large" if is_too_large else "not HTTP"}, 431 if is_too_large else 400
    )
