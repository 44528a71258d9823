"""A few pages of HTTP for operators, orchestrators and Prometheus: /healthz, /readyz, /metrics and what a process adds."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from baton.service.server import ListenError, split_address

_MAX_HEAD_BYTES = 8192
_TIMEOUT_S = 5.0
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class Reply(NamedTuple):
    body: bytes
    content_type: str = "application/json"
    status: int = 200


Page = Callable[[Mapping[str, str]], Reply]
"""From the request's headers, names in lower case, to what is answered."""


def json_reply(value: object, status: int = 200) -> Reply:
    return Reply(json.dumps(value).encode() + b"\n", status=status)


class Admin:
    """`readiness()` -> (ready, what to say); `pages`: further paths."""

    def __init__(self, readiness: Callable[[], tuple[bool, dict]], pages: Mapping[str, Page]):
        self._pages: dict[str, Page] = {
            "/healthz": lambda headers: json_reply({"status": "ok"}),
            "/readyz": lambda headers: _readiness(readiness),
            **pages,
        }
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> int:
        """Listen and return the port. Raises ListenError."""
        host, port = split_address(address)
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)
        except OSError as error:
            raise ListenError(f"--admin {address}: cannot listen: {error.strerror or error}") from None
        return self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reply = self._answer(await reader.readuntil(b"\r\n\r\n"))
                head = f"HTTP/1.1 {reply.status} {_REASONS[reply.status]}\r\nContent-Type: {reply.content_type}\r\n"
                head += f"Content-Length: {len(reply.body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
                writer.write(head.encode() + reply.body)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    def _answer(self, head: bytes) -> Reply:
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3:
            return json_reply({"error": "not HTTP"}, 400)
        if words[0] != "GET":
            return json_reply({"error": "only GET"}, 405)
        page = self._pages.get(words[1].partition("?")[0])
        if page is None:
            return json_reply({"error": f"here are {', '.join(sorted(self._pages))}"}, 404)
        named = (line.partition(":") for line in lines)
        return page({name.strip().lower(): value.strip() for name, _, value in named})


def _readiness(readiness: Callable[[], tuple[bool, dict]]) -> Reply:
    ready, body = readiness()
    return json_reply(body, 200 if ready else 503)
