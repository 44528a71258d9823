"""A client of the Kubernetes API server: JSON over HTTP, with watches as lines of JSON."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools

_CALL_S = 15.0
_QUIET_S = 90.0  # longer than a watch lasts
_READ_BYTES = 1 << 16
_MAX_BYTES = 64 << 20


class ApiError(Exception):
    """A failed call, in one line. `status` is that of HTTP, or 0 without an answer."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class KubernetesApi:
    """The server at `url`. The token is read from its file for each call, since it changes every hour."""

    def __init__(self, url: str, token: Path | None = None, tls: ssl.SSLContext | None = None):
        """Set up the client. Raises ValueError unless `url` is an http:// or https:// URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--api {url}: give http://HOST:PORT or https://HOST:PORT")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._netloc, self._token = parts.netloc, token

    async def call(self, method: str, path: str, patch: dict[str, Any] | None = None) -> Any:
        """Return the object in the answer; `patch` is a merge patch. Raises ApiError."""
        async with self._answer(method, path, patch, _CALL_S) as answer:
            body = b"".join([part async for part in answer.parts()])
        try:
            found = json.loads(body)
        except ValueError:
            raise ApiError(f"{method} {path}: {answer.status}, and no JSON", answer.status) from None
        if answer.status >= 300:
            raise ApiError(f"{method} {path}: {answer.status} {found.get('message', '')}".strip(), answer.status)
        return found

    async def events(self, path: str) -> AsyncIterator[dict[str, Any]]:
        """Yield each event of a watch until the server ends it. Raises ApiError."""
        async with self._answer("GET", path, None, _QUIET_S) as answer:
            rest = b""
            async for part in answer.parts():
                *lines, rest = (rest + part).split(b"\n")
                for line in filter(None, lines):
                    yield json.loads(line)

    @asynccontextmanager
    async def _answer(self, method: str, path: str, patch: dict[str, Any] | None, quiet_s: float):
        """Send a request on a new connection, and yield its answer. Raises ApiError, also out of the block."""
        writer = None
        try:
            async with asyncio.timeout(_CALL_S):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
                writer.write(self._request(method, path, patch))
                answer = _Answer(reader, quiet_s)
                await answer.read_head()
            yield answer
        except (OSError, TimeoutError, httptools.HttpParserError) as error:
            reason = str(error) or "no answer"
            raise ApiError(f"Kubernetes at {self._netloc}: {reason}") from None
        finally:
            if writer is not None:
                writer.close()

    def _request(self, method: str, path: str, patch: dict[str, Any] | None) -> bytes:
        body = b"" if patch is None else json.dumps(patch).encode()
        head = [f"{method} {path} HTTP/1.1", f"Host: {self._netloc}", "Accept: application/json", "Connection: close"]
        if self._token is not None:
            head.append(f"Authorization: Bearer {self._token.read_text().strip()}")
        if patch is not None:
            head += ["Content-Type: application/merge-patch+json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*head, "", ""]).encode() + body


class _Answer:
    """An HTTP answer, parsed as it arrives."""

    def __init__(self, reader: asyncio.StreamReader, quiet_s: float):
        self._reader, self._quiet_s = reader, quiet_s
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._has_head = self._is_whole = False
        self.status = 0

    # ---- called by the parser ----

    def on_headers_complete(self) -> None:
        self.status, self._has_head = self._parser.get_status_code(), True

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._is_whole = True

    # ---- called by users ----

    async def read_head(self) -> None:
        while not self._has_head:
            await self._feed()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body. It ends with the connection, if not before."""
        num_bytes = 0
        while True:
            parts, self._parts = self._parts, []
            for part in parts:
                num_bytes += len(part)
                if num_bytes > _MAX_BYTES:
                    raise OSError(f"an answer of more than {_MAX_BYTES >> 20} MiB")
                yield part
            if self._is_whole:
                return
            await self._feed()

    async def _feed(self) -> None:
        async with asyncio.timeout(self._quiet_s):
            data = await self._reader.read(_READ_BYTES)
        if data:
            self._parser.feed_data(data)
        elif self._has_head:
            self._is_whole = True
        else:
            raise OSError("the connection ended before an answer")
