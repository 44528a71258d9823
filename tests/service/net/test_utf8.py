"""Bytes that are no UTF-8 in the head of a call: the server serves on, and none of them is in the log."""

import asyncio
import contextlib
import logging
import os

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hpack import Encoder

from baton.service import logs
from baton.service.errors import Unauthenticated
from baton.service.net import server as grpc_server
from baton.service.net.server import Health
from baton.service.security.credentials import Credentials, new_key
from baton.service.security.guard import Guard
from tests.support.abuse.protocol_speakers import frame
from tests.support.pace import patience

OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
PATH = "/grpc.health.v1.Health/Check"
KEY, KEY_ID, DIGEST = new_key()


@pytest.fixture
def guard(tmp_path):
    (tmp_path / "credentials.toml").write_text(f'[keys.{KEY_ID}]\ntenant = "acme"\nsha256 = "{DIGEST}"\n')
    return Guard(Credentials(tmp_path / "credentials.toml"))


@contextlib.contextmanager
def logging_as_a_process():
    """Log to stderr within the block, and as before afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    logs.setup("gateway")
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


async def call(port: int, headers: dict[str, str | bytes]) -> None:
    """Make a call with this head, and wait for its end."""
    head = {":method": "POST", ":scheme": "http", ":path": PATH, ":authority": "localhost", "te": "trailers",
            "content-type": "application/grpc", **headers}  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(OPENING + frame(1, 4, 1, Encoder().encode(head)) + frame(0, 1, 1, b"\0\0\0\0\0"))
    ended = b"\1\5\0\0\0\1"  # HEADERS that end stream 1
    async with asyncio.timeout(patience(20)):
        heard = b""
        while ended not in heard and (more := await reader.read(4096)):
            heard += more
    writer.close()


@pytest.mark.parametrize("header", [":path", ":authority", "x-word", "authorization"])
async def test_a_server_serves_on_and_logs_nothing(header, guard, capfd):
    """gRPC 1.84 to 1.85 closes all ports for good where it is the path."""
    server = grpc_server.make_server(interceptors=[guard])
    Health(server).set("", True)
    port = grpc_server.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        with logging_as_a_process():
            await call(port, {header: f"/Bearer {KEY}".encode() + b"\xa0\xff"})
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=patience(20))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop(0)
    assert capfd.readouterr().err == ""


def test_a_key_is_followed_by_no_other_blank_than_spaces(guard):
    """Anything else is no part of the head's own form; a no-break space is no UTF-8 either, as it is sent."""
    assert guard.identify([f"Bearer {KEY} "], frozenset()) == "acme"
    with pytest.raises(Unauthenticated):
        guard.identify([f"Bearer {KEY}\xa0"], frozenset())


class FailedServer:
    """As gRPC's own whose loop has failed."""

    async def start(self) -> None:
        pass

    async def wait_for_termination(self) -> bool:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


async def test_a_process_ends_where_its_server_fails(monkeypatch, caplog):
    ended = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(os, "_exit", ended.set_result)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    await grpc_server.start(FailedServer())
    async with asyncio.timeout(patience(20)):
        assert await ended == 1
    (record,) = caplog.records
    assert "the gRPC server has failed, so this process ends: UnicodeDecodeError" in record.getMessage()


async def test_a_process_does_not_end_where_its_server_is_told_to(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    server = grpc_server.make_server()
    grpc_server.bind(server, "127.0.0.1:0")
    await grpc_server.start(server)
    await server.stop(0)
    async with asyncio.timeout(patience(20)):
        while any(task.get_name() == "end of the gRPC server" for task in asyncio.all_tasks()):
            await asyncio.sleep(0)
    assert not ended
