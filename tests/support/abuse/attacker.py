"""An attacker, in a process of its own: python -m tests.support.abuse.attacker. Takes orders as lines of JSON, says
`held` when everything is sent, and `ended` with the answers it has counted once it was asked to stop. Only to
127.0.0.1.
"""

import asyncio
import json
import resource
import socket
import ssl
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator

import uvloop

from tests.support.abuse.catalogue import ABUSES, ALL_ON_ONE, GRPC, Abuse, Method
from tests.support.abuse.protocol_speakers import CLIENT_HELLO_HALF, NOISE, SPEAKERS

_AT_ONCE = 50  # connections that are being made at a time
_CONNECT_S = 5.0
_PATIENCE_S = 3.0  # of a connection, in all, for room in its window: a refused one gets none
_DRIP_S = 0.02
_TURN = 20  # calls before the loop hears what was answered
_LINGER = struct.pack("ii", 1, 0)  # hangs up with a reset, so that ports are free at once


class Line(asyncio.Protocol):
    """One connection."""

    def __init__(self, order: dict, abuse: Abuse):
        self._abuse = abuse
        methods = [Method(path, bytes.fromhex(message)) for path, message in order["methods"]]
        metadata = [tuple(pair) for pair in order["metadata"]]
        self.speaker = SPEAKERS[order["speaks"]](abuse, methods, metadata, self.say)
        self.speaker.on_window = lambda: self._room.set()
        self._room = asyncio.Event()
        self._patience_s = _PATIENCE_S
        self._transport = None
        self.is_lost = False

    def connection_made(self, transport) -> None:
        self._transport = transport
        if not self._abuse.reads and not self.speaker.has_windows:
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self.speaker.hear(data)

    def connection_lost(self, exc) -> None:
        self.is_lost = True
        self.speaker.outcomes["hung up"] += 1
        self._room.set()

    def say(self, data: bytes) -> None:
        if data and not self.is_lost and not self._transport.is_closing():
            self._transport.write(data)

    async def room(self, num_bytes: int) -> bool:
        """Return whether the other side lets that much through."""
        while self.speaker.window < num_bytes and not self.is_lost:
            self._room.clear()
            began = time.monotonic()
            try:
                await asyncio.wait_for(self._room.wait(), self._patience_s)
            except TimeoutError:
                return False
            self._patience_s -= time.monotonic() - began
        self.speaker.window -= num_bytes
        return not self.is_lost

    def hang_up(self) -> None:
        if not self.is_lost:
            connected = self._transport.get_extra_info("socket")
            if connected is not None and connected.family != socket.AF_UNIX:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
            self._transport.abort()


class Attack:
    def __init__(self, order: dict):
        self._order = order
        self._abuse = ABUSES[order["abuse"]]
        self._count = order["count"]
        self._lines: list[Line] = []
        self._drips: list[tuple[Line, Iterator[bytes]]] = []
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._tls = self._context() if self._abuse.opening == "whole" else None
        self.outcomes: Counter[str] = Counter()

    async def begin(self) -> None:
        num_connections = 1 if self._abuse.calls == ALL_ON_ONE else -(-self._count // self._abuse.calls)
        numbers = range(self._count)
        await asyncio.gather(*(self._connection(numbers[first::num_connections]) for first in range(num_connections)))
        self._dripping = asyncio.create_task(self._drip())

    async def end(self) -> Counter[str]:
        self._dripping.cancel()
        for line in self._lines:
            self.outcomes.update(line.speaker.outcomes)
            line.hang_up()
        return self.outcomes

    async def _connection(self, numbers: range) -> None:
        async with self._gate:
            line = await self._connect()
            if line is None:
                return None
            if self._abuse.ending != "closed":
                self._lines.append(line)
            match self._abuse.opening:
                case "none":
                    return None
                case "garbage":
                    return line.say(NOISE)
                case "half":
                    return line.say(CLIENT_HELLO_HALF if self._order["tls"] else line.speaker.half_opening())
            line.say(line.speaker.opening())
            if self._abuse.ending == "closed":
                self.outcomes.update(line.speaker.outcomes)
                return line.hang_up()
        for number in numbers:
            if self._abuse.flood:
                line.say(line.speaker.flood(number))
                await asyncio.sleep(0)
            elif self._abuse.head != "none" and not await self._call(line, number):
                return None

    async def _call(self, line: Line, number: int) -> bool:
        """Return whether its message was sent; without room for one there is none for another."""
        call = line.speaker.call(number)
        line.say(call.head)
        for frame in call.body:
            if not await line.room(len(frame)):
                line.speaker.outcomes["no room"] += 1
                return False
            line.say(frame)
        if self._abuse.message == "slow":
            self._drips.append((line, call.drips))
        if number % _TURN == 0:
            await asyncio.sleep(0)
        return True

    async def _drip(self) -> None:
        while self._drips:
            for line, slow in self._drips:
                if (piece := next(slow, None)) is not None:
                    line.say(piece)
            await asyncio.sleep(_DRIP_S)

    async def _connect(self) -> Line | None:
        loop, make = asyncio.get_running_loop(), lambda: Line(self._order, self._abuse)
        try:
            async with asyncio.timeout(_CONNECT_S):
                if self._order["unix"]:
                    return (await loop.create_unix_connection(make, self._order["unix"]))[1]
                named = {"ssl": self._tls, "server_hostname": "localhost"} if self._tls else {}
                host, port = self._order["address"].rsplit(":", 1)
                where = (self._order["source"], 0)
                return (await loop.create_connection(make, host, int(port), local_addr=where, **named))[1]
        except (ConnectionResetError, TimeoutError, BlockingIOError):
            # There are too many, or it took longer than a handshake may. EAGAIN: a unix socket's backlog is full.
            self.outcomes["turned away"] += 1
        except OSError as error:
            self.outcomes[f"not connected: {type(error).__name__}"] += 1
        return None

    def _context(self) -> ssl.SSLContext | None:
        if not self._order["tls"]:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it trusts no server, and means harm
        context.set_alpn_protocols(["h2"] if self._order["speaks"] == GRPC else ["http/1.1"])
        if self._order["certificate"]:
            context.load_cert_chain(*self._order["certificate"])
        return context


async def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    attack = None
    while line := await lines.readline():
        if attack is None:
            attack = Attack(json.loads(line))
            await attack.begin()
            print(json.dumps({"held": True}), flush=True)
        else:
            print(json.dumps({"outcomes": await attack.end()}), flush=True)
            attack = None


if __name__ == "__main__":
    uvloop.run(main())
