"""A server of OpenAI's API that answers at once, or as the test says."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from tests.support.in_thread import serving_in_thread


class FakeOpenAI:
    """`step_s` before each token. `refuses`: fields that it answers 400. `usage` False: it never tells how many tokens
    there were. `breaks`: "error" or "garbage" in mid-stream, "hang" or "close" after the first token, "whole": one JSON
    object in place of a stream. `done`: its last line. `texts` False: no event has text."""

    def __init__(
        self, step_s: float = 0.0, refuses: tuple[str, ...] = (), usage: bool = True, breaks: str = "",
        done: bytes = b"data: [DONE]", texts: bool = True,
    ):  # fmt: skip
        self.step_s, self.refuses, self.usage, self.breaks, self.done = step_s, refuses, usage, breaks, done
        self.texts = texts
        self.requests: list[dict] = []
        self.num_connections = 0
        self.keys: set[str] = set()
        self.queries: set[str] = set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path, _, query = head.split(" ")[1].partition("?")
                self.queries.add(query)
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(fields["content-length"]))
                self.keys.add(fields.get("authorization", ""))
                if (head[:4], path) == ("GET ", "/v1/models"):
                    _reply(writer, 200, {"data": [{"id": "stub", "max_model_len": 4096}, {"id": "other"}]})
                elif (head[:5], path) == ("POST ", "/v1/completions"):
                    await self._complete(json.loads(body), writer)
                else:
                    _reply(writer, 404, {"detail": "Not Found"})
        writer.close()

    async def _complete(self, request: dict, writer: asyncio.StreamWriter) -> None:
        self.requests.append(request)
        if unknown := set(request) & set(self.refuses):
            return _reply(writer, 400, {"error": {"message": f"unknown field {min(unknown)}"}})
        if not request.get("stream") or self.breaks == "whole":
            return _reply(writer, 200, {"choices": [{"text": "a"}]})
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        num = request["max_tokens"]
        for index in range(num):
            await asyncio.sleep(self.step_s)
            text = "" if index == 1 or not self.texts else "x"  # half a character
            _event(writer, {"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None})
            if self.breaks == "hang":
                await asyncio.sleep(3600)
            elif self.breaks == "close":
                raise ConnectionResetError
            elif self.breaks == "garbage":
                _chunk(writer, b"data: <html>\n\n")
            elif self.breaks == "error":
                _event(writer, {"error": {"message": "out of memory"}})
        if self.usage:
            words = len(request["prompt"].split())
            told = {"prompt_tokens": words + 1, "completion_tokens": num, "prompt_tokens_details": {"cached_tokens": 3}}
            _event(writer, {"choices": [], "usage": told})
        _chunk(writer, self.done + b"\n\n")
        writer.write(b"0\r\n\r\n")


def _reply(writer: asyncio.StreamWriter, status: int, value: dict) -> None:
    body = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


def _event(writer: asyncio.StreamWriter, value: dict) -> None:
    """Write an event in two chunks, cut where it is not polite."""
    data = f"data: {json.dumps(value)}\n\n".encode()
    _chunk(writer, data[:9])
    _chunk(writer, data[9:])


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def serving_openai(stub: FakeOpenAI) -> contextlib.AbstractContextManager[str]:
    """Serve it in a thread of its own; yields its URL."""

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[str]:
        server = await asyncio.start_server(stub.answer, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            server.close()

    return serving_in_thread(serve)
