"""Frames between a process that has constraints checked and the checker: a length in 8 bytes, then that many bytes."""

from typing import BinaryIO

MAX_CPU_S = 2.0  # for one constraint


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """Write one frame. Raises OSError."""
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()
