"""Send jobs to any server of OpenAI's HTTP API as streamed /completions, with one connection per running request."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httptools

from baton.loadgen.outcome import Outcome
from baton.loadgen.plan import CallFailed, OpenAIServer, RunPlan, Unreachable
from baton.loadgen.workload import FIRST_TOKEN, Job, prompt_ids
from baton.service.logs import printable
from baton.service.security.access import Access

# Words that, with the space before them, are one token each in the vocabularies of most models; the server's tokenizer
# is not known.
_FREQUENT = """
the of and to in is for on that by this with you it not or be are from at as your all have new more an was we will
home can us about if page my has search free but our one other do no information time they site he up may what
which their news out use any there see only so his when contact here business who web also now help get
"""
WORDS = _FREQUENT.split()
VOCAB_SIZE = FIRST_TOKEN + len(WORDS)  # of the ids that stand for words here
_INFO_S, _READ_BYTES, _MOST_OF_AN_ERROR = 10.0, 1 << 16, 4096


@dataclass(frozen=True)
class OpenAIInfo:
    """What a server says of its model; `context` is None if it does not say."""

    server: OpenAIServer
    context: int | None


async def openai_info(url: str, model: str | None, access: Access) -> OpenAIInfo:
    """Ask the server for its models (`model` None: take the first) and for one token. Raises Unreachable."""
    if not (parts := urlsplit(url)).hostname or parts.scheme not in ("http", "https"):
        raise Unreachable(f"--openai {url}: give the address of an API, such as http://127.0.0.1:8000/v1")
    client = _Client(url, access)
    try:
        listed = json.loads(await client.whole("GET", "/models", None, _INFO_S))["data"]
        known = {each["id"]: each for each in listed}
        name = model or next(iter(known))
        if name not in known:
            raise Unreachable(f"{url} has no model {name!r}: it has {', '.join(known)}")
        for ignores_eos in (True, False):
            server = OpenAIServer(url, name, ignores_eos)
            body = _body(server, "the", 1, stream=False)
            try:
                await client.whole("POST", "/completions", body, _INFO_S)
                break
            except CallFailed as failed:  # the field is an extension of OpenAI's API
                if not ignores_eos or failed.status not in ("HTTP 400", "HTTP 422"):
                    raise
        context = known[name].get("max_model_len")
        return OpenAIInfo(server, context if isinstance(context, int) else None)
    except CallFailed as failed:
        raise Unreachable(f"{url}: {failed.status}: {failed.reason}") from None
    except (ValueError, KeyError, TypeError, StopIteration, AttributeError):
        raise Unreachable(f"{url}/models lists no models: is it the address of an OpenAI API, with its /v1?") from None
    finally:
        client.close()


class OpenAIBackend:
    """Calls a server of OpenAI's API. A prompt is as many words as the job has tokens; token counts are the
    server's."""

    def __init__(self, plan: RunPlan, server: OpenAIServer):
        self._plan, self._server = plan, server
        self._client = _Client(server.url, plan.access)

    async def close(self) -> None:
        self._client.close()

    def make(self, job: Job) -> bytes:
        ids = prompt_ids(job, VOCAB_SIZE, self._plan.seed)
        prompt = " ".join(WORDS[each - FIRST_TOKEN] for each in ids)
        return _body(self._server, prompt, job.num_output, stream=True)

    async def stream(self, request: bytes, outcome: Outcome) -> AsyncIterator[int]:
        """Yield 1 for each event with text. At the end, the tokens that had no event of their own are added to the
        outcome."""
        num_events, usage = 0, None
        async for event in self._events(request):
            if "error" in event:
                raise CallFailed("UNAVAILABLE", printable(str(event["error"])))
            usage = event.get("usage") or usage
            if any(choice.get("text") for choice in event.get("choices", ())):
                num_events += 1
                yield 1
        if usage:
            outcome.num_prompt = usage.get("prompt_tokens") or outcome.num_prompt
            outcome.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if num_events and (more := (usage.get("completion_tokens") or 0) - num_events) > 0:
                outcome.num_output += more

    async def _events(self, request: bytes) -> AsyncIterator[dict[str, Any]]:
        """Yield all events of a stream. Raises CallFailed, also if the stream does not end with [DONE]."""
        is_done, is_stream, first = False, False, b""
        async for line in self._client.lines("POST", "/completions", request, self._plan.timeout_s):
            if not line.startswith(b"data:"):
                first = first or line[:_MOST_OF_AN_ERROR].strip()
                continue
            is_stream = True
            if (data := line[5:].strip()) == b"[DONE]":
                is_done = True
            else:
                yield _event_of(data)
        if not is_stream:
            raise CallFailed("UNAVAILABLE", f"no stream of events: {printable(first.decode(errors='replace'))}")
        if not is_done:
            raise CallFailed("UNAVAILABLE", "the stream ended before its [DONE]")


def _event_of(data: bytes) -> dict[str, Any]:
    """Parse an event. Raises CallFailed."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise CallFailed("UNAVAILABLE", f"no event: {printable(data[:_MOST_OF_AN_ERROR].decode(errors='replace'))}")
    return event


def _body(server: OpenAIServer, prompt: str, max_tokens: int, *, stream: bool) -> bytes:
    fields: dict[str, Any] = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if server.ignores_eos:
        fields["ignore_eos"] = True
    return json.dumps(fields).encode()


class _Client:
    """Calls below one URL. The only exception it raises is CallFailed."""

    def __init__(self, url: str, access: Access):
        parts: SplitResult = urlsplit(url)
        self._host, self._path = parts.hostname or "", parts.path.rstrip("/") or "/v1"
        self._query = f"?{parts.query}" if parts.query else ""  # some APIs want a version with every call
        self._tls = ssl.create_default_context(cafile=access.tls_ca) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        lines = [f"host: {parts.netloc.rpartition('@')[2]}", "content-type: application/json", "accept: */*"]
        self._headers = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in access.metadata)])
        self._free: list[_Connection] = []

    def close(self) -> None:
        for connection in self._free:
            connection.close()

    async def whole(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        return b"\n".join([line async for line in self.lines(method, path, body, timeout_s)])

    async def lines(self, method: str, path: str, body: bytes | None, timeout_s: float) -> AsyncIterator[bytes]:
        """Yield the lines of the answer as they arrive."""
        head = f"{method} {self._path}{path}{self._query} HTTP/1.1\r\n{self._headers}"
        data = f"{head}\r\ncontent-length: {len(body or b'')}\r\n\r\n".encode() + (body or b"")
        timer, connection = None, None
        try:
            connection = await self._connected(data, timeout_s)
            timer = asyncio.get_running_loop().call_later(timeout_s, connection.time_out)
            lines, rest = list[bytes](), b""
            async for piece in connection.pieces():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines if connection.status == 200 else ():
                    yield line.rstrip(b"\r")
                rest = rest[:_MOST_OF_AN_ERROR] if connection.status != 200 else rest
            if connection.status != 200:
                raise CallFailed(
                    f"HTTP {connection.status}", printable((b"".join(lines) + rest).decode(errors="replace"))
                )
            if rest:
                yield rest
            if connection.keeps_alive:
                self._free.append(connection)
                connection = None
        except (OSError, httptools.HttpParserError, ssl.SSLError, TimeoutError) as error:
            if (connection is not None and connection.timed_out) or isinstance(error, TimeoutError):
                raise CallFailed("DEADLINE_EXCEEDED", f"no answer within {timeout_s:g} s") from None
            raise CallFailed("UNAVAILABLE", printable(str(error))) from None
        finally:
            if timer is not None:
                timer.cancel()
            if connection is not None:
                connection.close()

    async def _connected(self, data: bytes, timeout_s: float) -> "_Connection":
        """Return a connection on which the request has been sent: an idle one that is still open, or a new one."""
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed:
                connection.send(data)
                return connection
            connection.close()
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        connection = _Connection(reader, writer)
        connection.send(data)
        return connection


class _Connection:
    """One connection with one exchange at a time; its parser calls the methods on_*."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._parser, self._bodies = httptools.HttpResponseParser(self), list[bytes]()
        self._is_complete = self.timed_out = self.keeps_alive = False
        self.status = 0

    @property
    def is_closed(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    def time_out(self) -> None:
        self.timed_out = True
        self._writer.transport.abort()

    def send(self, data: bytes) -> None:
        self._parser, self._is_complete, self.keeps_alive = httptools.HttpResponseParser(self), False, False
        self._writer.write(data)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises OSError, HttpParserError."""
        while not self._is_complete:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._parser.feed_data(data)
            for body in self._taken():
                yield body

    def _taken(self) -> Iterator[bytes]:
        bodies, self._bodies = self._bodies, []
        return iter(bodies)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._bodies.append(body)

    def on_message_complete(self) -> None:
        self._is_complete, self.keeps_alive = True, self._parser.should_keep_alive()  # known only here
