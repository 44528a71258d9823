"""What a launcher says: lines of its own, and those of its children. A thread writes them, so that who launches waits
neither for a reader that stands still nor for a disk, and ends for none."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from typing import TextIO

_MAX_BYTES = 4 << 20  # that wait to be written
_LAST_S = 2.0  # in which what waits at the end is written


class LineWriter:
    """Writes lines in their order. Those that cannot be written, or come while too many wait, are lost; a later one
    says how many."""

    def __init__(self, max_bytes: int = _MAX_BYTES):
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._waiting: deque[tuple[int, bytes]] = deque()  # the first one is being written
        self._num_lost, self._num_reported = 0, 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def log(self, line: str) -> None:
        """Write a line to stderr."""
        with self._changed:
            lost = self._num_lost
            notice = (
                f"baton: {lost} lines of this log could not be written so far\n" if lost > self._num_reported else ""
            )
            if self._put(sys.stderr, f"{notice}{line}\n"):
                self._num_reported = lost

    def announce(self, line: str) -> None:
        """Write a line to stdout."""
        with self._changed:
            self._put(sys.stdout, f"{line}\n")

    def flush(self, timeout_s: float = _LAST_S) -> bool:
        """Return whether all is written, after a while at most."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _put(self, stream: TextIO | None, text: str) -> bool:
        """Return whether there was room."""
        try:
            fd = stream.fileno() if stream is not None else None
        except (OSError, ValueError):  # it has none, or was closed
            fd = None
        if fd is None:  # nobody ever wanted to read it
            return False
        data = text.encode(errors="backslashreplace")
        if self._num_bytes + len(data) > self._max_bytes:
            self._num_lost += 1
            return False
        self._waiting.append((fd, data))
        self._num_bytes += len(data)
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
            self._thread.start()
        return True

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                fd, data = self._waiting[0]
            was_written = _write(fd, data)
            with self._changed:
                self._waiting.popleft()
                self._num_bytes -= len(data)
                self._num_lost += not was_written
                self._changed.notify_all()


def _write(fd: int, data: bytes) -> bool:
    """Not by the stream: a thread that stands still in it would have its lock when the process ends."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:  # the disk is full, or the reader has gone
        return False
    return True


_writer = LineWriter()
log, announce, flush = _writer.log, _writer.announce, _writer.flush
