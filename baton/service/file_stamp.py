"""Files that are read again when they have changed."""

from pathlib import Path


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes with the file; None: there is no file. One that is replaced within a tick of the
    clock is another file still."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
