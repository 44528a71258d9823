"""Detect that a file has changed and must be read again."""

from pathlib import Path


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes with the file; None if there is no file. The value includes the inode, so it also
    differs for a file that is replaced within one tick of the clock."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
