"""Move KV over TCP, which reaches every host: the source sends the bytes after each Ready, the taker receives them into
its pool."""

import asyncio
import socket
from collections.abc import Callable

from baton.addresses import split_address
from kvtransfer.errors import PeerLost
from kvtransfer.transports.socket_connection import SocketConnection, SocketListener
from kvtransfer.wire import MAX_TAKER_FRAME_BYTES

CONNECT_S = 3.0


async def listen(host: str, on_connection: Callable, port: int = 0) -> SocketListener:
    """Listen for takers; `port` 0: the system chooses. Raises OSError, which names the host."""
    sock = await listening(host, port)
    return SocketListener(
        sock, lambda accepted: SocketConnection(accepted, max_frame_bytes=MAX_TAKER_FRAME_BYTES), on_connection
    )


async def connect(address: str) -> SocketConnection:
    """Connect to a source at `address`, host:port. Raises PeerLost."""
    return SocketConnection(await connected(address))


async def listening(host: str, port: int = 0) -> socket.socket:
    """Return a bound socket whose connections send without delay, since an Ack must not wait for more bytes. `port` 0:
    the system chooses. Raises OSError, which names the host."""
    try:
        family, kind, proto, _, address = (await _resolve(host, port))[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by what is accepted
            if port:  # connections of an earlier process may still linger
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen for KV on {host}{f', port {port}' if port else ''}: {error}") from error
    return sock


async def connected(address: str) -> socket.socket:
    """Connect to a source at `address`, host:port. Raises PeerLost."""
    until = asyncio.get_running_loop().time() + CONNECT_S
    why: Exception | str = "no such host"
    try:
        async with asyncio.timeout_at(until):
            found = await _resolve(*split_address(address))
        for index, (family, kind, proto, _, target) in enumerate(found):
            left_s = until - asyncio.get_running_loop().time()
            try:
                # An address that drops packets leaves time for the next one.
                async with asyncio.timeout(left_s / (len(found) - index)):
                    return await _connected_to(socket.socket(family, kind, proto), target)
            except TimeoutError:
                why = f"no answer within {CONNECT_S:g} s"
            except OSError as error:
                why = error
    except TimeoutError:
        why = f"no answer of the DNS within {CONNECT_S:g} s"
    except (OSError, ValueError) as error:  # ValueError: not an address or a name
        why = error
    raise PeerLost(f"the source cannot be reached at {address}: {why}")


async def _connected_to(sock: socket.socket, target: tuple) -> socket.socket:
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


async def _resolve(host: str, port: int) -> list:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
