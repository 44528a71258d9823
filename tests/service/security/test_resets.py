"""Calls that are refused after their callers have reset them: what they leave behind, and whom they keep waiting."""

import asyncio
import contextlib
import gc
import itertools
import struct

import grpc
import pytest
from hpack import Encoder

from baton.service.net import server as grpc_server
from baton.service.net.server import Health
from baton.service.security.guard import Guard
from baton.service.security.resets import NOTICE_S, WARY_S, Resets
from baton.system import heap_bytes
from tests.support.abuse.protocol_speakers import frame
from tests.support.pace import patience

OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
HEAD: dict[bytes | str, bytes | str] = {
    ":method": "POST", ":scheme": "http", ":path": "/x/y", ":authority": "localhost", "te": "trailers",
    "content-type": "application/grpc",
}  # fmt: skip
CANCEL = struct.pack(">I", 8)
NUM_WARM, NUM_CALLS = 500, 2000


async def refuse(resets: Resets, error: BaseException) -> None:
    """Send a refusal, which ends so."""
    with pytest.raises(type(error)):
        async with resets:
            raise error


async def test_who_is_refused_waits_only_after_a_call_was_met_that_had_been_reset(waits, clock):
    resets = Resets()
    await refuse(resets, grpc.aio.AbortError())
    await refuse(resets, grpc.aio.InternalError())
    assert not waits
    await refuse(resets, grpc.aio.AbortError())
    assert waits == [NOTICE_S]
    clock[0] += WARY_S
    await refuse(resets, grpc.aio.AbortError())
    assert waits == [NOTICE_S]


async def test_who_is_reset_as_it_waits_lets_the_next_ones_wait(clock):
    resets = Resets()
    await refuse(resets, grpc.aio.InternalError())
    clock[0] += 0.9 * WARY_S
    waiting = asyncio.create_task(refuse(resets, grpc.aio.AbortError()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    clock[0] += 0.9 * WARY_S
    assert resets.is_wary


@pytest.mark.skipif(not heap_bytes(), reason="this malloc does not tell what is in use")
async def test_they_leave_next_to_nothing():
    """Each left 400 bytes for ever (grpc/grpc#43360), as fast as a stranger could send them."""
    guard = Guard()
    server = grpc_server.make_server(interceptors=[guard])
    Health(server)
    port = grpc_server.bind(server, "127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(patience(60)):
        before = await in_use_after(guard, port, NUM_WARM)
        after = await in_use_after(guard, port, NUM_WARM + NUM_CALLS)
    await server.stop(None)
    assert (after - before) / NUM_CALLS < 100


async def in_use_after(guard: Guard, port: int, num_refused: int) -> int:
    """Return the bytes in use after so many refused calls in all, each reset as it was opened."""
    while guard.num_denied.total() < num_refused:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reading, encoder = asyncio.create_task(reader.read()), Encoder()
        writer.write(OPENING)
        with contextlib.suppress(ConnectionError):
            for stream in itertools.count(1, 2):
                writer.write(frame(1, 4, stream, encoder.encode(HEAD)) + frame(3, 0, stream, CANCEL))
                if stream % 32 == 31:
                    await writer.drain()
                    await asyncio.sleep(0.005)
                    if guard.num_denied.total() >= num_refused or reading.done():
                        break
        writer.close()
        await asyncio.gather(reading, return_exceptions=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(3):  # behind which none of them waits
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/x/y")(b"")
    gc.collect()
    return heap_bytes()["used"]
