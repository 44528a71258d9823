"""Health that streams, ports that are taken, messages that are too large, signals; with real servers."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.client import NO_RETRIES, AsyncClient
from baton.protocol import KEEPER_VARIABLE
from baton.service.net import server as net_server
from baton.service.net.client import open_channel
from baton.service.net.server import (
    AddressInUse,
    Health,
    ListenError,
    bind,
    enable_reflection,
    make_server,
    until_stopped,
)
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.pace import patience
from tests.support.process import ROOT

SERVICE = "baton.v1.Inference"


async def serve(prepare, **options):
    server = make_server(**options)
    prepared = prepare(server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    return server, prepared, open_channel(f"127.0.0.1:{port}")


async def test_watch_streams_every_change():
    server, health, channel = await serve(Health)
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    seen = []

    async def next_status():
        answer = await asyncio.wait_for(watch.read(), 10)
        seen.append(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    await next_status()
    health.set(SERVICE, False)
    await next_status()
    health.set(SERVICE, True)
    await next_status()
    health.set(SERVICE, True)  # no change, no message
    health.shut_down()
    await next_status()
    assert seen == ["SERVICE_UNKNOWN", "NOT_SERVING", "SERVING", "NOT_SERVING"]
    watch.cancel()
    await channel.close()
    await server.stop(0)


async def test_health_checks_process_and_services():
    server, health, channel = await serve(Health)
    stub = health_pb2_grpc.HealthStub(channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING
    health.set("", True)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as raised:
        await stub.Check(health_pb2.HealthCheckRequest(service="none.such"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    await channel.close()
    await server.stop(0)


async def test_what_was_computed_is_sent_whatever_its_size():
    """Log-probabilities of a long answer could have more than 16 MiB: they were lost when all had been computed."""
    text = "x" * (17 << 20)

    class Long(inference_pb2_grpc.InferenceServicer):
        async def Detokenize(self, request, context):
            return pb.DetokenizeResponse(text=text)

    server = make_server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Long(), server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}", retry=NO_RETRIES) as client:
        assert await client.detokenize([1], timeout_s=patience(20)) == text
    await server.stop(0)


async def test_reflection_lists_services():
    server, _, channel = await serve(lambda server: enable_reflection(server, [SERVICE]))
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    call.cancel()
    await channel.close()
    await server.stop(0)


async def test_address_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "127.0.0.1:%d" % taken.getsockname()[1]
        with pytest.raises(AddressInUse) as raised:
            bind(make_server(), address)
    assert address in str(raised.value) and "\n" not in str(raised.value)


async def test_second_gRPC_server_does_not_share_the_port():
    first = make_server()
    port = bind(first, "127.0.0.1:0")
    await first.start()
    with pytest.raises(AddressInUse):
        bind(make_server(), f"127.0.0.1:{port}")
    await first.stop(0)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:x", ":1", "127.0.0.1:70000", "203.0.113.7:50051", "a..b:1"]
)
async def test_bad_address_is_one_line(address):
    with pytest.raises(ListenError) as raised:
        bind(make_server(), address)
    assert address in str(raised.value) and "\n" not in str(raised.value)


class Echo(inference_pb2_grpc.InferenceServicer):
    async def Tokenize(self, request, context):
        return pb.TokenizeResponse()


@pytest.mark.parametrize(
    "max_pending_s, busy_s, said", [(1, 2.5, "CANCELLED"), pytest.param(None, 31, "OK", marks=pytest.mark.long)]
)
async def test_calls_wait_until_a_busy_process_takes_them(monkeypatch, max_pending_s, busy_s, said):
    """gRPC's own bound is 30 s; seen of a burst on a machine that was busy."""
    if max_pending_s:
        monkeypatch.setattr(net_server, "MAX_PENDING_S", max_pending_s)
    server = make_server()
    Health(server)
    port = bind(server, "127.0.0.1:0")
    await server.start()

    def check(timeout_s: float) -> str:
        try:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            return "OK"
        except grpc.RpcError as error:
            return error.code().name

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, ThreadPoolExecutor(4) as threads:
        stub = health_pb2_grpc.HealthStub(channel)
        assert await asyncio.wrap_future(threads.submit(check, patience(10))) == "OK"
        waiting = [threads.submit(check, busy_s + patience(30)) for _ in range(4)]  # one is taken at once
        time.sleep(busy_s)
        ends = [await asyncio.wrap_future(each) for each in waiting]
    await server.stop(None)
    assert set(ends) == {"OK", said}


async def test_too_large_a_message_is_refused():
    prepare = lambda server: inference_pb2_grpc.add_InferenceServicer_to_server(Echo(), server)  # noqa: E731
    server, _, channel = await serve(prepare, max_message_bytes=1 << 20)
    stub = inference_pb2_grpc.InferenceStub(channel)
    await stub.Tokenize(pb.TokenizeRequest(text="x" * 1_000_000))
    with pytest.raises(grpc.RpcError) as raised:
        await stub.Tokenize(pb.TokenizeRequest(text="x" * (1 << 20)))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await channel.close()
    await server.stop(0)


SIGNALLED = """
import asyncio, sys
from baton.service.net.server import run
async def main(stop):
    print("up", flush=True)
    await stop.wait()
    print("draining", flush=True)
    if "hang" in sys.argv:
        await asyncio.to_thread(sys.stdin.read)
    return 3
sys.exit(run(main, use_uvloop="uvloop" in sys.argv))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_first_signal_drains_second_kills(number, loop):
    for hang in ("", "hang"):
        with draining(number, loop, hang) as process:
            if hang:
                os.kill(process.pid, number)
            assert process.wait(patience(20)) == (-number if hang else 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_is_no_other_where_a_keeper_waits_for_the_end(number, monkeypatch):
    """systemd sends SIGTERM to all processes of a unit, and `baton up` its own behind it: every stream was cut."""
    monkeypatch.setenv(KEEPER_VARIABLE, "baton up")
    with draining(number, "", "hang") as process:
        os.kill(process.pid, number)
        process.stdin.close()
        assert process.wait(patience(20)) == 3


@contextmanager
def draining(number: signal.Signals, *arguments: str) -> Iterator[subprocess.Popen]:
    """A process that has had its first signal; with "hang" it drains until its stdin is closed."""
    argv = [sys.executable, "-c", SIGNALLED, *arguments]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, number)
        assert process.stdout.readline() == "draining\n"
        yield process


async def test_what_fails_as_it_is_told_to_end_is_told(caplog):
    begun, stop = asyncio.Event(), asyncio.Event()

    async def work():
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            raise OSError("the lease is not given up")

    ending = asyncio.create_task(until_stopped(work(), stop))
    await begun.wait()
    stop.set()
    assert await ending is None
    assert "OSError: the lease is not given up" in caplog.text


def test_grpc_itself_writes_nothing_for_callers_that_it_refuses():
    """Nothing for a connection or a call that is not well: who reaches a port does not fill the log."""
    program = """
import asyncio, sys
from baton.service.net.server import Health, bind, make_server
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

async def main():
    server = make_server()
    Health(server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address, compression=grpc.Compression.Gzip) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x" * 1000))
        except grpc.aio.AioRpcError as error:
            print(error.code().name)
    await server.stop(None)

asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (ran.stdout.strip(), ran.stderr) == ("UNIMPLEMENTED", "")


ENDS_WITH_A_CALL = """
import atexit, grpc, threading
from baton.service.net.server import run

atexit.register(lambda: print([thread.name for thread in threading.enumerate() if "poll" in thread.name]))

async def main(stop):
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        try:
            await channel.stream_stream("/a/b")().read()
        except grpc.aio.AioRpcError as error:
            raise ValueError("nobody is there") from None

try:
    run(main)
except ValueError as error:
    print(error)
"""


def test_grpc_has_no_thread_left_when_a_program_ends():
    """What its calls hold goes before the interpreter, which else may abort as it ends."""
    done = subprocess.run([sys.executable, "-c", ENDS_WITH_A_CALL], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["nobody is there", "[]"]), done.stderr
