"""A few lines of HTTP for operators and orchestrators: GET /healthz and GET /readyz, in JSON."""

import asyncio
import json
from collections.abc import Callable

from baton.service.server import ListenError, split_address

_MAX_HEAD_BYTES = 8192
_TIMEOUT_S = 5.0
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class Admin:
    """`readiness()` -> (ready, what to say)."""

    def __init__(self, readiness: Callable[[], tuple[bool, dict]]):
        self._readiness = readiness
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
                status, body = self._answer(await reader.readuntil(b"\r\n\r\n"))
                payload = json.dumps(body).encode() + b"\n"
                head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    def _answer(self, head: bytes) -> tuple[int, dict]:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3:
            return 400, {"error": "not HTTP"}
        if words[0] != b"GET":
            return 405, {"error": "only GET"}
        if words[1] == b"/healthz":
            return 200, {"status": "ok"}
        if words[1] == b"/readyz":
            ready, body = self._readiness()
            return (200 if ready else 503), body
        return 404, {"error": "/healthz and /readyz are here"}
