"""Connections as a server accepts them: while it begins to drain, and when accepting fails."""

import asyncio
import errno
import itertools
import socket

import pytest
import uvloop
from starlette.responses import PlainTextResponse

from baton.service.net.http_server import HttpServer, open_http
from tests.support.pace import patience

GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
REAL_ACCEPT = socket.socket.accept


def started() -> HttpServer:
    server = open_http("127.0.0.1:0", PlainTextResponse("ok"), lambda *refused: PlainTextResponse("bad", 400))
    server.start()
    return server


async def answered(client: socket.socket) -> bytes:
    """Return the first line of the answer to a request on this connection."""
    reader, writer = await asyncio.open_connection(sock=client)
    try:
        writer.write(GET)
        return await asyncio.wait_for(reader.readline(), patience(10))
    finally:
        writer.close()


async def answered_at_drain(is_drain_first: bool) -> bytes:
    """Return what a client is answered that connects in the turn of the loop in which the server begins to drain."""
    server, loop = started(), asyncio.get_running_loop()
    told, telling = socket.socketpair()

    def drain() -> None:
        loop.remove_reader(told)
        server.drain()

    loop.add_reader(told, drain)
    await asyncio.sleep(0.02)  # the loop watches both
    if is_drain_first:
        telling.send(b"x")
    client = socket.create_connection(("127.0.0.1", server.port))
    if not is_drain_first:
        telling.send(b"x")
    with told, telling:
        line = await answered(client)
    await server.stop()
    return line


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("is_drain_first", [True, False])
def test_a_connection_that_arrives_as_the_server_drains_is_answered(new_loop, is_drain_first, caplog):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(answered_at_drain(is_drain_first)).startswith(b"HTTP/1.1 200")
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("failure", "is_logged"), [(OSError(errno.EMFILE, "no descriptors"), False), (RuntimeError("a bug"), True)]
)
async def test_a_server_that_could_not_accept_goes_on(monkeypatch, caplog, failure, is_logged):
    failures = [failure]

    def accept(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return REAL_ACCEPT(listener)

    server = started()
    monkeypatch.setattr(socket.socket, "accept", accept)
    assert (await answered(socket.create_connection(("127.0.0.1", server.port)))).startswith(b"HTTP/1.1 200")
    await server.stop()
    assert not failures and is_logged == any(record.exc_info for record in caplog.records)


async def test_a_flood_of_connections_leaves_each_turn_of_the_loop_to_others(monkeypatch):
    server, admitted, admit = started(), [], HttpServer._admit
    monkeypatch.setattr(HttpServer, "_admit", lambda self, connection: (admitted.append(0), admit(self, connection)))
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    numbers = [0]
    while numbers[-1] < len(clients):
        await asyncio.sleep(0)
        numbers.append(len(admitted))
    assert max(after - before for before, after in itertools.pairwise(numbers)) <= 16
    assert (await answered(clients[-1])).startswith(b"HTTP/1.1 200")
    for client in clients:
        client.close()
    await server.stop()
