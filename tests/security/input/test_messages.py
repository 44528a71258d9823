"""Messages and bytes that no honest client sends, to a gateway's port: refused, and no other client is affected (H6,
H7, H9)."""

import asyncio
import gzip
import socket
import struct

import grpc
import pytest

from baton.v1 import inference_pb2 as pb
from tests.gateway.conftest import cluster, digest, folder  # noqa: F401
from tests.support.client import make_request

GENERATE = "/baton.v1.Inference/Generate"
GOOD = make_request([20, 21, 22], max_tokens=2)


async def code_of(call) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


class Neighbour:
    """An honest client on its own connection: `async with` it, and none of its requests fails."""

    def __init__(self, c):
        self._stub = c.stub

    async def __aenter__(self) -> "Neighbour":
        self.num_answers, self._stop = 0, False
        self._task = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, *exc) -> None:
        at = self.num_answers
        async with asyncio.timeout(30):
            while self.num_answers < at + 3 and not self._task.done():
                await asyncio.sleep(0.005)
        self._stop = True
        await self._task

    async def _ask(self) -> None:
        while not self._stop:
            assert await code_of(self._stub.Generate(GOOD, timeout=20)) is grpc.StatusCode.OK
            self.num_answers += 1


METADATA = {
    "20 KiB": [("x-big", "a" * 20_480)],
    "1,000 pairs": [(f"x-{i}", "v") for i in range(1000)],
    "just beyond 8 KiB": [("x-big", "a" * 8192)],
    "65 pairs": [(f"x-{i}", "v") for i in range(65)],
}


@pytest.mark.parametrize("name", METADATA)
async def test_metadata_is_bounded(cluster, name):  # noqa: F811
    """Refused each time: there is no soft limit at which only some are."""
    async with cluster() as c, Neighbour(c):
        for _ in range(5):
            code = await code_of(c.stub.Generate(GOOD, timeout=20, metadata=METADATA[name]))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await code_of(c.stub.Generate(GOOD, timeout=20)) is grpc.StatusCode.OK


async def test_metadata_that_is_allowed(cluster):  # noqa: F811
    async with cluster() as c:
        for metadata in ([("x-big", "a" * 6000)], [(f"x-{i}", "v") for i in range(50)], [("x-bin", bytes(range(256)))]):
            assert await code_of(c.stub.Generate(GOOD, timeout=20, metadata=metadata)) is grpc.StatusCode.OK


def raw(stub_channel: grpc.aio.Channel, body: bytes, **options):
    return stub_channel.unary_stream(GENERATE)(body, timeout=20, **options)


async def test_a_large_message(cluster):  # noqa: F811
    async with cluster() as c, Neighbour(c):
        body = make_request("a" * (5 << 20)).SerializeToString()
        assert await code_of(raw(c.channel, body)) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("method", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_messages_are_refused_unread(cluster, method):  # noqa: F811
    """A bomb costs no more than a word: gRPC would expand all of it before it looks at the length."""
    async with cluster() as c, Neighbour(c):
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(c.target, options=options, compression=method) as channel:
            for body in (GOOD.SerializeToString(), make_request("a" * (64 << 20)).SerializeToString()):
                assert await code_of(raw(channel, body)) is grpc.StatusCode.UNIMPLEMENTED
        assert await code_of(c.stub.Generate(GOOD, timeout=20)) is grpc.StatusCode.OK


# ---- bytes that are no gRPC ----

HEADERS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # an empty SETTINGS frame
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TALK = {
    "HTTP/1": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "noise": bytes(range(256)) * 16,
    "half a preface": PREFACE[:12],
    "nothing": b"",
    "a frame of 16 MiB": PREFACE + struct.pack(">I", (1 << 24) - 1)[1:] + b"\x00\x00\x00\x00\x00\x01",
    "settings, many": PREFACE + HEADERS * 2000,
    "resets, many": PREFACE + HEADERS + (b"\x00\x00\x04\x03\x00\x00\x00\x00\x01" + bytes(4)) * 2000,
    "gzip": PREFACE + gzip.compress(b"a" * 1000),
}


@pytest.mark.parametrize("name", TALK)
async def test_strangers_do_not_disturb(cluster, name):  # noqa: F811
    """Fifty at once, and left open."""
    async with cluster() as c, Neighbour(c):
        host, port = c.target.split(":")
        open_sockets = [socket.create_connection((host, int(port))) for _ in range(50)]
        for each in open_sockets:
            try:
                each.sendall(TALK[name])
            except ConnectionError:
                pass  # it has hung up already
        await asyncio.sleep(0.05)
        assert await code_of(c.stub.Generate(GOOD, timeout=20)) is grpc.StatusCode.OK
        for each in open_sockets:
            each.close()


@pytest.mark.long
async def test_five_hundred_half_prefaces(cluster):  # noqa: F811
    async with cluster() as c:
        host, port = c.target.split(":")
        open_sockets = [socket.create_connection((host, int(port))) for _ in range(500)]
        for each in open_sockets:
            each.sendall(PREFACE[:5])
        times = []
        for _ in range(100):
            begun = asyncio.get_running_loop().time()
            assert await code_of(c.stub.Generate(GOOD, timeout=20)) is grpc.StatusCode.OK
            times.append(asyncio.get_running_loop().time() - begun)
        print(f"100 requests beside 500 half-open connections: p99 {1e3 * sorted(times)[98]:.1f} ms")
        for each in open_sockets:
            each.close()


async def test_a_message_that_cannot_be_parsed(cluster):  # noqa: F811
    async with cluster() as c, Neighbour(c):
        nested = b""
        for _ in range(3000):
            nested = b"\x32" + _varint(len(nested)) + nested
        for body in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", nested, b"\x1a\x05ab", b"\x1a\x02\xff\xfe"):
            code = await code_of(raw(c.channel, body))
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), code
        assert pb.GenerateRequest.FromString(GOOD.SerializeToString()) == GOOD


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])
