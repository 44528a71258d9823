"""The writer of what a launcher says: in order, never waited for, and what is lost is counted and told."""

import errno
import os
import sys
import threading

import pytest

from baton.cli.launch.placing.log import LineWriter
from tests.support.pace import patience


@pytest.fixture
def pipe():
    """Its two ends."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reader, open(writing, "w") as stream:
        yield reader, stream


def told(num: int) -> str:
    return f"baton: {num} lines of this log could not be written so far"


def test_lines_are_in_their_order(pipe, monkeypatch):
    reader, stream = pipe
    monkeypatch.setattr(sys, "stderr", stream)
    writer = LineWriter()
    for number in range(100):
        writer.log(f"line {number} \udcff")
    assert writer.flush(patience(10))
    assert os.read(reader.fileno(), 1 << 16).decode() == "".join(f"line {number} \\udcff\n" for number in range(100))


def test_nobody_waits_where_nobody_reads(pipe, monkeypatch):
    reader, stream = pipe
    monkeypatch.setattr(sys, "stderr", stream)
    writer, read = LineWriter(max_bytes=1 << 16), []
    for _ in range(64):  # what a pipe holds
        writer.log("x" * 1023)
        writer.flush(patience(1))
    for _ in range(300):  # what may wait, and more
        writer.log("x" * 1023)
    assert not writer.flush(0.01)

    def drain():
        while b"last" not in (part := os.read(reader.fileno(), 1 << 16)):
            read.append(part)
        read.append(part)

    reading = threading.Thread(target=drain)
    reading.start()
    assert writer.flush(patience(10))
    writer.log("last")
    reading.join(patience(10))
    *lines, count, last = b"".join(read).decode().splitlines()
    assert last == "last" and set(lines) == {"x" * 1023} and count == told(364 - len(lines)) and len(lines) < 200


def test_what_cannot_be_written_is_told_once_it_can(pipe, monkeypatch):
    reader, stream = pipe
    monkeypatch.setattr(sys, "stderr", stream)
    writer, write = LineWriter(), os.write

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        for _ in range(3):
            writer.log("lost")
            assert writer.flush(patience(10))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))  # part by part, as a pipe may take it
    for line in ("first", "second"):
        writer.log(line)
    assert writer.flush(patience(10))
    assert os.read(reader.fileno(), 1 << 16).decode().splitlines() == [told(3), "first", "second"]


def test_without_streams(monkeypatch):
    """`baton up >&- 2>&-`"""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    writer = LineWriter()
    writer.log("to nobody")
    writer.announce("to nobody")
    assert writer.flush(0)
