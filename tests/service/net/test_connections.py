"""Connections that say nothing: they end by themselves, and however many there are, descriptors are left."""

import asyncio
import contextlib
import resource
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.service.net import server as grpc_server
from baton.service.net.server import Health
from tests.security.conftest import installation  # noqa: F401

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
HELLO = b"\x16\x03\x01\x02\x00"  # of TLS, its first five bytes


@contextlib.asynccontextmanager
async def serving(tls=None):
    server = grpc_server.make_server()
    Health(server).set("", True)
    port = grpc_server.bind(server, "127.0.0.1:0", tls and tls.server(require_certificate=False))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def lasted(port: int, said: bytes) -> float:
    """Seconds until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = time.monotonic()
    writer.write(said)
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(60):
            while await reader.read(1000):
                pass
    writer.close()
    return time.monotonic() - begun


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(grpc_server, "HANDSHAKE_S", 1.0)


@pytest.mark.parametrize("said", [b"", PREFACE[:10], PREFACE], ids=["nothing", "half", "no settings"])
async def test_who_does_not_begin_is_hung_up_on(said, soon):
    async with serving() as port:
        assert await lasted(port, said) < 40  # 1 s, and a busy machine's


@pytest.mark.parametrize("said", [b"", HELLO], ids=["nothing", "half"])
async def test_who_does_not_shake_hands_is_hung_up_on(said, installation, soon):  # noqa: F811
    async with serving(installation.tls("gateway")) as port:
        assert await lasted(port, said) < 40


async def test_a_connection_without_calls_ends(monkeypatch):
    monkeypatch.setattr(grpc_server, "IDLE_S", 1.0)
    async with serving() as port:
        assert await lasted(port, PREFACE + SETTINGS) < 40
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{port}"
        ) as channel:  # and a client that returns does not notice
            for _ in range(3):
                stub = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                await asyncio.sleep(1.5)


FEW = """
import asyncio, resource, sys
hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, hard), hard))
from baton.service import logs; from baton.service.net import server
from baton.service.net.server import Health
logs.setup("gateway")
async def main(stop):
    grpc = server.make_server()
    Health(grpc).set("", True)
    ports = [server.bind(grpc, "127.0.0.1:0") for _ in range(2)]
    await grpc.start()
    print(*ports, resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
    await stop.wait()
sys.exit(server.run(main))
"""


@contextlib.contextmanager
def few(hard: int):
    """A server of two ports in a process with that limit of descriptors: (its first line, the process)."""
    with subprocess.Popen(
        [sys.executable, "-c", FEW, str(hard)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield list(map(int, process.stdout.readline().split())), process
        finally:
            process.terminate()


def test_the_soft_limit_is_raised_and_a_low_one_is_said():
    with few(256) as ((*_, limit), process):
        assert limit == 256
        process.terminate()
        assert "WARNING few descriptors" in process.stderr.read()


async def test_connections_on_one_port_leave_descriptors_for_the_other():
    with few(256) as ((first, second, _), process):
        idle = []
        for _ in range(300):
            with contextlib.suppress(OSError):
                idle.append(await asyncio.open_connection("127.0.0.1", first))
                idle[-1][1].write(PREFACE + SETTINGS)
        for port in (second, first):  # the first after some have ended
            for _, writer in idle[:250] if port == first else ():
                writer.close()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert process.poll() is None
        for _, writer in idle:
            writer.close()


def test_without_a_limit_there_is_a_bound(monkeypatch):
    for found, bound in ((resource.RLIM_INFINITY, 1 << 20), (1 << 30, 1 << 20), (20_000, 20_000)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, found=found: (found, found))
        assert grpc_server.num_descriptors() == bound
