"""The log of a launcher and its child processes. A thread writes it, so that the launcher never waits for a slow reader
or a disk, nor ends because of one."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from typing import TextIO

_MAX_BYTES = 4 << 20  # waiting to be written
_LAST_S = 2.0  # for writing the rest at the end


class LineWriter:
    """Writes lines in order. Lines that cannot be written, or that come while too many wait, are lost; a later line
    says how many."""

    def __init__(self, max_bytes: int = _MAX_BYTES):
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._waiting: deque[tuple[int, bytes]] = deque()  # the first is being written
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
        """Wait until everything is written, or `timeout_s`; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _put(self, stream: TextIO | None, text: str) -> bool:
        """Queue a text, and return whether there was room."""
        try:
            fd = stream.fileno() if stream is not None else None
        except (OSError, ValueError):  # the stream has no descriptor, or is closed
            fd = None
        if fd is None:  # nobody reads it
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
    """Write to the descriptor, not the stream: a thread that blocks in a stream would hold its lock when the process
    ends. Return whether it succeeded."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:  # the disk is full, or the reader is gone
        return False
    return True


_writer = LineWriter()
log, announce, flush = _writer.log, _writer.announce, _writer.flush
