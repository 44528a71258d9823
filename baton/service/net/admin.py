"""A few pages of HTTP for operators, orchestrators and Prometheus: /healthz, /readyz, /metrics and what a process adds."""

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from baton.service.net.host_names import HostNames, without_port
from baton.service.net.server import ListenError, split_address

_MAX_HEAD_BYTES = 8192
_TIMEOUT_S = 5.0
# The loop accepts a whole backlog (100) in one pass before it reads a byte: with 64, a request that had been sent was
# among the oldest connections and closed unread. 512 descriptors are few beside the limit that a process starts with.
_MAX_CONNECTIONS = 512
_REASONS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 421: "Misdirected Request",
    503: "Service Unavailable",
}  # fmt: skip


class Reply(NamedTuple):
    body: bytes
    content_type: str = "application/json"
    status: int = 200
    headers: tuple[str, ...] = ()  # further lines of the head


Page = Callable[[Mapping[str, str]], Reply]
"""From the request's headers, names in lower case, to what is answered."""


def json_reply(value: object, status: int = 200) -> Reply:
    return Reply(json.dumps(value).encode() + b"\n", status=status)


class Admin:
    """`readiness()` -> (ready, what to say); `pages`: further paths; `hosts`: names that it is asked by."""

    def __init__(
        self,
        readiness: Callable[[], tuple[bool, dict]],
        pages: Mapping[str, Page],
        hosts: Collection[str] = (),
    ):
        self._pages: dict[str, Page] = {
            "/healthz": lambda headers: json_reply({"status": "ok"}),
            "/readyz": lambda headers: _readiness(readiness),
            **pages,
        }
        self._hosts = HostNames(hosts)
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> int:
        """Listen and return the port. Raises ListenError."""
        host, port = split_address(address)
        self._hosts.add(host)
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)
        except OSError as error:
            raise ListenError(f"--admin {address}: cannot listen: {error.strerror or error}") from None
        return self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (
            len(self._open) >= _MAX_CONNECTIONS
        ):  # a request that comes at once is answered beside any number of silent ones
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reply = self._answer(await reader.readuntil(b"\r\n\r\n"))
                head = f"HTTP/1.1 {reply.status} {_REASONS[reply.status]}\r\nContent-Type: {reply.content_type}\r\n"
                head += f"Content-Length: {len(reply.body)}\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
                head += "".join(f"{line}\r\n" for line in reply.headers) + "Connection: close\r\n\r\n"
                writer.write(head.encode() + reply.body)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._open.pop(writer, None)
            writer.close()

    def _answer(self, head: bytes) -> Reply:
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3:
            return json_reply({"error": "not HTTP"}, 400)
        if words[0] != "GET":
            return json_reply({"error": "only GET"}, 405)
        named = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        hosts = [value for name, value in named if name == "host"]
        if len(hosts) != 1 and (hosts or words[2] != "HTTP/1.0"):
            return json_reply({"error": "a request names its Host once"}, 400)
        if hosts and hosts[0] not in self._hosts:
            told = f"{without_port(hosts[0])[:100]} is not this host: --admin-hosts lists its names"
            return json_reply({"error": told}, 421)
        page = self._pages.get(words[1].partition("?")[0])
        if page is None:
            return json_reply({"error": f"here are {', '.join(sorted(self._pages))}"}, 404)
        return page(dict(named))


def _readiness(readiness: Callable[[], tuple[bool, dict]]) -> Reply:
    ready, body = readiness()
    return json_reply(body, 200 if ready else 503)
