"""A way between the first stage and another one: messages in order, both ways. A transport to other hosts is handed
in."""

import socket
import struct
import threading
from typing import Protocol

from baton.engine.parallel.collectives import RankLost

Bytes = bytes | bytearray | memoryview
_LENGTH = struct.Struct("<q")


class RankStream(Protocol):
    """One end. `send` from any thread, `receive` from one; both raise RankLost when the other end is gone."""

    shares_memory: bool  # with the other end: rows are there, and do not travel
    num_received: int  # messages so far; from another host pieces of them, so that it grows while a long one comes

    def send(self, *parts: Bytes) -> None:
        """Send the parts, one after the other, as one message."""
        ...

    def receive(self) -> memoryview:
        """Wait for a message."""
        ...

    def close(self) -> None:
        """End it: both ends' waits too. Idempotent."""
        ...


class SocketStream:
    """Over a connected socket to a process of this host."""

    shares_memory = True

    def __init__(self, connected: socket.socket):
        self._socket, self._lock = connected, threading.Lock()
        self.num_received = 0

    def send(self, *parts: Bytes) -> None:
        length = sum(memoryview(part).nbytes for part in parts)
        try:
            with self._lock:
                self._socket.sendall(b"".join((_LENGTH.pack(length), *parts)))
        except OSError:
            raise RankLost("a stage is gone") from None

    def receive(self) -> memoryview:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        message = self._exactly(length)
        self.num_received += 1
        return message

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is closed, or the other end is
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
