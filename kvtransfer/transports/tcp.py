"""TCP: reaches anywhere. The source sends the bytes behind each Ready, the taker receives into its pool."""

import asyncio
import socket
from collections.abc import Callable

from kvtransfer.errors import PeerLost
from kvtransfer.transports.socket_line import SocketLine, SocketListener
from kvtransfer.wire import MAX_TAKER_FRAME_BYTES

CONNECT_S = 3.0


async def listen(host: str, on_line: Callable) -> SocketListener:
    """On a port that the system chooses. Raises OSError naming the host."""
    sock = await listening(host)
    return SocketListener(sock, lambda accepted: SocketLine(accepted, max_frame_bytes=MAX_TAKER_FRAME_BYTES), on_line)


async def connect(address: str) -> SocketLine:
    """`address`: host:port. Raises PeerLost."""
    return SocketLine(await connected(address))


async def listening(host: str) -> socket.socket:
    """Bound, on a port that the system chooses; what it accepts sends at once, as an Ack must not wait for company.
    Raises OSError naming the host."""
    try:
        family, kind, proto, _, address = (await _resolve(host, 0))[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by what is accepted
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except OSError as exc:
        raise OSError(f"cannot listen for KV on {host}: {exc}") from exc
    return sock


async def connected(address: str) -> socket.socket:
    """`address`: host:port. Raises PeerLost."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PeerLost(f"address {address!r} is not host:port")
    error: Exception | None = None
    try:
        async with asyncio.timeout(CONNECT_S):
            for family, kind, proto, _, target in await _resolve(host.strip("[]"), int(port)):
                sock = socket.socket(family, kind, proto)
                sock.setblocking(False)
                try:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    await asyncio.get_running_loop().sock_connect(sock, target)
                    return sock
                except BaseException as exc:
                    sock.close()
                    if not isinstance(exc, OSError):
                        raise
                    error = exc
    except (OSError, TimeoutError) as exc:
        error = exc
    raise PeerLost(f"the source cannot be reached at {address}: {error or 'no such host'}")


async def _resolve(host: str, port: int) -> list:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
