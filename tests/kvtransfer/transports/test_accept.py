"""A connection that cannot be accepted does not block others."""

import asyncio
import socket

import pytest

from kvtransfer.transports.socket_line import SocketLine, SocketListener


@pytest.mark.parametrize("refusal", [MemoryError, OSError])
async def test_the_next_one_is_accepted(refusal):
    lines, refusals = asyncio.Queue(), [refusal()]

    def make_line(sock: socket.socket) -> SocketLine:
        if refusals:
            raise refusals.pop()
        return SocketLine(sock)

    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.bind(("127.0.0.1", 0))
    listener = SocketListener(server, make_line, lines.put_nowait)
    takers = [socket.create_connection(server.getsockname()) for _ in range(2)]
    line = await asyncio.wait_for(lines.get(), 10)
    assert not refusals and lines.empty()
    line.close()
    await listener.close()
    for taker in takers:
        taker.close()
