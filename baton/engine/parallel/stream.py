"""A connection between the first stage and another one, with ordered messages both ways. Transports to other hosts are
handed in."""

import socket
import struct
import threading
from typing import Protocol

from baton.engine.parallel.collectives import RankLost

Bytes = bytes | bytearray | memoryview
_LENGTH = struct.Struct("<q")


class RankStream(Protocol):
    """Hold one end. `send` from any thread, `receive` from one; both raise RankLost when the other end is gone."""

    shares_memory: bool  # with the other end: rows are there already and do not travel
    # Messages so far; from another host pieces of messages, so that it grows while a long one arrives.
    num_received: int

    def send(self, *parts: Bytes) -> None:
        """Send the parts, one after the other, as one message."""
        ...

    def receive(self) -> memoryview:
        """Wait for a message."""
        ...

    def close(self) -> None:
        """Close the connection, which ends the waits of both ends. Idempotent."""
        ...


class SocketStream:
    """Connect over a socket to a process of this host."""

    shares_memory = True

    def __init__(self, connected: socket.socket):
        self._socket, self._lock = connected, threading.Lock()
        self.num_received = 0

    def send(self, *parts: Bytes) -> None:
        """Send the parts as one message. Raises RankLost."""
        length = sum(memoryview(part).nbytes for part in parts)
        try:
            with self._lock:
                self._socket.sendall(b"".join((_LENGTH.pack(length), *parts)))
        except OSError:
            raise RankLost("a stage is gone") from None

    def receive(self) -> memoryview:
        """Wait for a message. Raises RankLost."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        message = self._exactly(length)
        self.num_received += 1
        return message

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it or the other end is closed already
            pass

    def _exactly(self, length: int) -> memoryview:
        data = memoryview(bytearray(length))
        begin = 0
        while begin < length:
            try:
                count = self._socket.recv_into(data[begin:])
            except OSError:
                count = 0
            if not count:
                raise RankLost("a stage is gone")
            begin += count
        return data
