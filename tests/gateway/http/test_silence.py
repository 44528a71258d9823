"""Streams that are silent, before their first token or behind it, show that they live."""

import asyncio
import itertools
import json
from types import SimpleNamespace

import httpx2
import pytest

from baton.service.net.http_connection import FLOW
from gateway.http import call as call_module
from gateway.http.call import HttpCall
from gateway.http.wire.encoding import event
from gateway.http.wire.errors import to_json
from tests.support.pace import patience

_MESSAGES = {"messages": [{"role": "user", "content": "a quick fox"}], "max_tokens": 3}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_DOORS = {
    "chat/completions": (_MESSAGES, b": \n\n"),
    "completions": ({"prompt": [20, 21, 22], "max_tokens": 3}, b": \n\n"),
    "responses": ({"input": "a quick fox", "max_output_tokens": 3}, b": \n\n"),
    "messages": (_MESSAGES, _PING),
}


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(call_module, "_FIRST_SILENCE_S", 0.1)
    monkeypatch.setattr(call_module, "_SILENCE_S", 0.05)


def asking(client, path: str, **more):
    body, _ = _DOORS[path]
    return client.stream("POST", path, json={"model": "fake", "stream": True, **body}, **more)


def raw(client) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=client.base_url, timeout=patience(20))


def events(data: bytes, ping: bytes) -> list[str]:
    return [each for each in data.replace(ping, b"").decode().split("\n\n") if each]


def text_of(value) -> str:
    """Join the texts of an event, wherever in it they are."""
    if isinstance(value, dict):
        own = (value[key] for key in ("content", "text", "delta") if isinstance(value.get(key), str))
        return "".join((*own, *map(text_of, value.values())))
    return "".join(map(text_of, value)) if isinstance(value, list) else ""


def gist(data: bytes, ping: bytes) -> tuple[str, list[str]]:
    """Return what does not depend on how many tokens share an event: the text, and the kinds of neighbours."""
    found = events(data, ping)
    bodies = [each.partition("data: ")[2] for each in found]
    kinds = [kind for kind, _ in itertools.groupby(each.partition("data: ")[0] for each in found)]
    return "".join(text_of(json.loads(each)) for each in bodies if each != "[DONE]"), kinds


@pytest.mark.parametrize("path", _DOORS)
async def test_a_stream_that_is_silent_has_pings_and_nothing_else_is_other(served, hasty, path):
    _, ping = _DOORS[path]
    async with served() as (c, client), raw(client) as http:
        async with asking(http, path) as undisturbed:
            wanted = gist(await undisturbed.aread(), ping)
        for worker in c.prefill:
            worker.hold("prefill")
        c.decode[0].hold("decode")
        async with asking(http, path) as answer:
            data, parts = b"", answer.aiter_bytes()
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
            while data.count(ping) < 2:
                data += await anext(parts)
            assert data == ping * data.count(ping)  # before the first token
            for worker in c.prefill:
                worker.release("prefill")
            while not data.endswith(3 * ping) or data == ping * data.count(ping):
                data += await anext(parts)
            c.decode[0].release("decode")
            data += b"".join([part async for part in parts])
    assert gist(data, ping) == wanted and wanted[0] and not data.endswith(ping)


async def test_who_hangs_up_behind_a_ping_is_heard(served, hasty):
    async with served() as (c, client), raw(client) as http:
        c.decode[0].hold("decode")
        async with asking(http, "chat/completions") as answer:
            data, parts = b"", answer.aiter_bytes()
            while data.count(b": \n\n") < 2:
                data += await anext(parts)
            assert "cancel" not in c.decode[0].kinds()
        await c.until(lambda: "cancel" in c.decode[0].kinds())
        c.decode[0].release("decode")
        await c.idle()


async def test_a_client_of_http_1_0_has_pings(served, hasty):
    body = json.dumps({"model": "fake", "stream": True, **_MESSAGES}).encode()
    head = b"POST /v1/chat/completions HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    async with served() as (c, _):
        c.decode[0].hold("decode")
        reader, writer = await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(patience(20)):
            answer = await reader.readuntil(2 * b": \n\n")
            c.decode[0].release("decode")
            answer += await reader.read()
        writer.close()
    assert b" 200 OK" in answer.partition(b"\r\n")[0] and answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", _DOORS)
async def test_what_fails_once_a_stream_had_to_begin_is_its_last_event(served, hasty, path):
    _, ping = _DOORS[path]
    async with served() as (c, client), raw(client) as http:
        for worker in c.prefill:
            worker.hold("prefill")
        async with asking(http, path, headers={"x-request-timeout": f"{patience(1)}"}) as answer:
            (last,) = events(await answer.aread(), ping)
        assert answer.status_code == 200 and "deadline" in json.loads(last.partition("data: ")[2])["error"]["message"]


async def test_an_answer_in_one_object_has_no_pings(served, hasty):
    async with served() as (c, client), raw(client) as http:
        for worker in c.prefill:
            worker.hold("prefill")
        asked = asyncio.create_task(http.post("completions", json={"model": "fake", "prompt": [20], "max_tokens": 3}))
        await asyncio.sleep(0.5)
        for worker in c.prefill:
            worker.release("prefill")
        assert (await asked).json()["usage"]["completion_tokens"] == 3


async def test_pings_wait_for_a_client_that_does_not_read(hasty):
    """It has more to read than these."""
    flow, sent = SimpleNamespace(write_paused=True), list[dict]()

    async def send(message) -> None:
        sent.append(message)

    scope = {"headers": [], "method": "POST", "path_params": {}, "extensions": {FLOW: flow}}
    call = HttpCall(scope, asyncio.Event().wait, send, to_json)
    call.open_stream(event, b": \n\n")
    watching = asyncio.create_task(call._watch(asyncio.current_task()))
    await asyncio.sleep(0.5)
    assert not sent
    flow.write_paused = False
    async with asyncio.timeout(patience(20)):
        while len(sent) < 3:
            await asyncio.sleep(0.01)
    assert [message.get("body") for message in sent[:3]] == [None, b": \n\n", b": \n\n"]
    watching.cancel()
