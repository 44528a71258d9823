"""The pages of --admin: what is answered, to whom by which name, and with how many that say nothing."""

import asyncio
import json
import socket
from contextlib import ExitStack

import pytest
from starlette.requests import Request
from starlette.responses import Response

from baton.service.net import admin as admin_module
from baton.service.net.admin import Admin, Page, _SharedPage, json_response
from baton.service.observe.metrics import Gauge, Metrics
from tests.support.pace import patience


class Asking:
    """`async with Asking(hosts, address) as ask`: `status, answer = await ask(head)`."""

    def __init__(self, hosts=(), address: str = "127.0.0.1:0", pages=None):
        self._admin, self._address = Admin(lambda: (False, {"ready": False}), pages or {}, hosts), address

    async def __aenter__(self) -> "Asking":
        self.port = await self._admin.start(self._address)
        return self

    async def __aexit__(self, *exc) -> None:
        await self._admin.stop()

    @property
    def connections(self) -> set:
        return self._admin._server.server_state.connections

    async def __call__(self, head: bytes) -> tuple[int, dict]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head)
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r")[0]))
        writer.close()
        assert body.count(b"\n") == 1  # one line, whatever was asked
        return int(head.split(b" ")[1]), json.loads(body)


async def test_pages_answer_and_other_requests_are_refused():
    async with Asking() as ask:
        host = b"Host: localhost\r\n\r\n"
        assert await ask(b"GET /healthz HTTP/1.1\r\n" + host) == (200, {"status": "ok"})
        assert await ask(b"GET /readyz HTTP/1.0\r\nx: y\r\n\r\n") == (503, {"ready": False})
        assert (await ask(b"GET /other HTTP/1.1\r\n" + host))[0] == 404
        assert (await ask(b"POST /healthz HTTP/1.1\r\n" + host))[0] == 405
        assert (await ask(b"nonsense\r\n\r\n"))[0] == 400


async def test_a_page_is_made_once_for_all_who_wait_and_the_others_have_their_turns():
    """Each has one that was made after it asked; who asks otherwise has its own."""
    num_made, turns = 0, []

    def make(form) -> Response:
        nonlocal num_made
        num_made += 1
        turns.append(num_made)
        return json_response({"made": num_made})

    def ask(accept: str = "*/*"):
        scope = {"type": "http", "headers": [(b"accept", accept.encode())]}
        return asyncio.create_task(shared.answer(Request(scope)))

    async def others() -> None:
        while num_made < 6:
            turns.append(0)
            await asyncio.sleep(0)

    shared = _SharedPage(Page(make, lambda request: request.headers["accept"]), asyncio.Lock())
    first = [ask() for _ in range(100)]
    first[0].cancel()
    assert {(await each).body for each in first[1:]} == {b'{"made": 1}\n'}
    assert (await ask()).body == b'{"made": 2}\n'
    await asyncio.gather(others(), *map(ask, "abcd"))
    assert num_made == 6 and all(0 in turns[turns.index(n) : turns.index(n + 1)] for n in range(3, 6))


async def test_a_scrape_is_made_once_whatever_its_callers_accept_and_name_as_host():
    """Seen: 6,400 that each accepted something else kept Prometheus waiting for 53 s, behind pages for callers that had
    gone."""
    made, metrics = [], Metrics("tiny")
    metrics.collect(Gauge("made", "text", lambda: len(made.append(1) or made)))
    shared = _SharedPage(metrics.page, asyncio.Lock())
    accepted = [f"x/{n}" for n in range(50)] + [f"application/openmetrics-text; version={n}" for n in range(50)]
    scopes = [
        {"type": "http", "headers": [(b"accept", accept.encode()), (b"host", b"10.0.0.%d" % n)]}
        for n, accept in enumerate(accepted)
    ]
    answers = await asyncio.gather(*(shared.answer(Request(scope)) for scope in scopes))
    assert len(made) == 2 and len({each.body for each in answers}) == 2
    assert "openmetrics" in answers[-1].headers["content-type"] and "plain" in answers[0].headers["content-type"]


async def test_pages_of_a_process():
    page = Page(lambda host: json_response({"asked": host}), lambda request: request.headers["host"])
    async with Asking(pages={"/more": page}) as ask:
        heads = [b"GET /more HTTP/1.1\r\nHost: localhost\r\n\r\n"] * 20
        assert await asyncio.gather(*map(ask, heads)) == [(200, {"asked": "localhost"})] * 20
        assert (await ask(b"POST /more HTTP/1.1\r\nHost: localhost\r\n\r\n"))[0] == 405


OURS = [
    "localhost", "LocalHost:9464", "127.0.0.1", "127.0.0.1:9464", "[::1]", "[::1]:9464", "10.1.2.3:9464",
    "gateway.example", "Gateway.Example:9464", "other",
]  # fmt: skip
OTHERS = ["evil.example", "evil.example:9464", "127.0.0.1.evil.example", "localhost.evil.example", "evil:localhost",
          ":9464", "gateway.example.", "0x7f.1", "[evil]", "[::1%; script-src *]", "x" * 5000]  # fmt: skip


@pytest.mark.parametrize("host", OURS)
async def test_names_of_this_host(host):
    async with Asking(["Gateway.Example", "other"]) as ask:
        assert (await ask(f"GET /healthz HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()))[0] == 200


@pytest.mark.parametrize("host", OTHERS)
async def test_a_name_that_was_made_to_lead_here_reads_nothing(host):
    async with Asking(["gateway.example"]) as ask:
        for page in ("healthz", "readyz", "fleet.json", "metrics"):
            status, answer = await ask(f"GET /{page} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert status == 421 and answer.keys() == {"error"} and "--admin-hosts" in answer["error"]
            assert len(answer["error"]) < 200


@pytest.mark.parametrize("host", ["", '"\x1b[31m'])
async def test_a_host_that_is_none_is_bad_http(host):
    async with Asking(["gateway.example"]) as ask:
        status, answer = await ask(f"GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert status == 400 and answer.keys() == {"error"}


async def test_what_is_listened_on_is_a_name_of_this_host():
    async with Asking(address="localhost:0") as ask:
        assert (await ask(b"GET /healthz HTTP/1.1\r\nHost: localhost:1\r\n\r\n"))[0] == 200


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: evil.example\r\n"])
async def test_a_request_names_its_host_once(hosts):
    async with Asking() as ask:
        assert (await ask(b"GET /healthz HTTP/1.1\r\n" + hosts + b"\r\n"))[0] == 400


async def test_a_request_is_answered_though_a_backlog_of_silent_connections_came_right_after_it():
    async with Asking() as ask:
        with ExitStack() as sockets:
            asking = sockets.enter_context(socket.create_connection(("127.0.0.1", ask.port), timeout=10))
            asking.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            for _ in range(95):  # the loop, which this blocks, accepts all of them in one pass
                sockets.enter_context(socket.create_connection(("127.0.0.1", ask.port), timeout=10))
            answer = await asyncio.to_thread(asking.recv, 1000)
            assert answer.startswith(b"HTTP/1.1 200 ")


async def test_a_caller_is_answered_beside_a_thousand_idle_connections():
    async with Asking() as ask:
        idle = []
        for index in range(1000):
            reader, writer = await asyncio.open_connection("127.0.0.1", ask.port)
            writer.write(b"GET /healthz HTTP/1.1\r\n" if index % 2 else b"")
            idle.append((reader, writer))
            if index % 100 == 0:
                assert (await ask(b"GET /healthz HTTP/1.0\r\n\r\n"))[0] == 200
        assert (await ask(b"GET /healthz HTTP/1.0\r\n\r\n"))[0] == 200
        assert len(ask.connections) <= 512
        async with asyncio.timeout(30):  # the others, which had 5 s
            for reader, writer in idle:
                try:
                    assert await reader.read() == b""
                except ConnectionResetError:
                    pass
                writer.close()
        while ask.connections:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_pages", [1, 16])
async def test_those_who_read_nothing_leave_their_places_to_others(monkeypatch, num_pages):
    """Once a page waits for room in their connection; they could hold all of them for ever."""
    monkeypatch.setattr(admin_module, "_MAX_CONNECTIONS", 4)
    monkeypatch.setattr(admin_module, "_UNREAD_S", 0.5)

    page = Page(lambda form: json_response("x" * ((12 << 20) // num_pages)))
    async with Asking(pages={"/metrics": page}) as ask:
        with ExitStack() as sockets:
            for _ in range(4):
                silent = sockets.enter_context(socket.create_connection(("127.0.0.1", ask.port), timeout=10))
                silent.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * num_pages)
            async with asyncio.timeout(patience(5)):
                while len(ask.connections) < 4:
                    await asyncio.sleep(0.01)
                while ask.connections:
                    await asyncio.sleep(0.01)
            assert (await ask(b"GET /healthz HTTP/1.0\r\n\r\n"))[0] == 200
