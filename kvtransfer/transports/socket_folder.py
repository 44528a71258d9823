"""Make the folder of this process's unix sockets, below a parent folder that all processes of a host, or containers
with a common volume, can see. A process that makes its folder first removes those of processes that have ended."""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path

from baton import system

_PREFIX = "baton-kv-"
_LOCK = "lock"
SOCKET = "kv"
_SETTLE_S = 10.0  # younger folders may not have their lock yet
_NAME = re.compile(rf"{_PREFIX}[A-Za-z0-9_]+/{SOCKET}")
_MAX_SOCKET_PATH = 107  # bytes of sun_path, without its final null


def default_parent() -> Path:
    return Path(tempfile.gettempdir())


def host_id(parent: Path) -> str:
    """Return an id that is equal for two processes exactly when they run under one kernel and see the same folder.
    Raises OSError."""
    status = os.stat(parent)
    return hashlib.sha256(f"{system.boot_id()}/{status.st_dev}/{status.st_ino}".encode()).hexdigest()[:32]


def socket_path(parent: Path, address: str) -> str:
    """Return the path of the socket that `address` names below `parent`. Raises ValueError for an address that leads
    out of it."""
    if not _NAME.fullmatch(address):
        raise ValueError(f"{address[:80]!r} names no socket below {parent}")
    return str(parent / address)


def check_peer(sock: socket.socket) -> None:
    """Raise PermissionError unless the other end of a unix socket belongs to this user or root. Folders keep other
    users out, but root can enter another user's folder that has the name of one that was removed."""
    user = system.user_behind(sock)
    if user not in (os.geteuid(), 0):
        raise PermissionError(errno.EACCES, f"the socket is another user's, {user}")


class SocketFolder:
    """Own a folder with mode 0700, locked as long as the process lives: the kernel releases the lock however the
    process ends."""

    def __init__(self, parent: Path):
        """Make the folder below `parent`, after removing those of ended processes. Raises OSError, one line, if
        `parent` cannot hold sockets."""
        sweep(parent)
        try:
            self._path, self._lock = _make(parent)
        except OSError as error:
            raise OSError(f"no KV sockets can be made in {parent}: {error.strerror or error}") from error
        self.address = f"{self._path.name}/{SOCKET}"
        self._socket_path = str(self._path / SOCKET)
        if len(os.fsencode(self._socket_path)) > _MAX_SOCKET_PATH:
            self.remove()
            raise OSError(f"{parent} is too long a path for unix sockets, at most {_MAX_SOCKET_PATH} bytes with them")

    def bind(self) -> socket.socket:
        """Return the socket that takers find at `address`. On failure removes the folder and raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(self._socket_path)
        except OSError:
            sock.close()
            self.remove()
            raise
        return sock

    def remove(self) -> None:
        """Remove the folder. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self._path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _make(parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # another process removed it, since this one was stopped for _SETTLE_S
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path / _LOCK)):
                return path, lock
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(lock)


def sweep(parent: Path) -> list[str]:
    """Remove this user's folders whose processes have ended; return their names."""
    swept = []
    try:
        found = [Path(entry.path) for entry in os.scandir(parent) if entry.name.startswith(_PREFIX)]
    except OSError:
        return []
    for path in found:
        try:
            status = os.stat(path, follow_symlinks=False)
            owned = status.st_uid == os.geteuid() and path.is_dir() and not path.is_symlink()
            if owned and time.time() - status.st_mtime > _SETTLE_S and _is_abandoned(path):
                shutil.rmtree(path)
                swept.append(path.name)
        except OSError:
            continue  # another process was faster, or this user may not remove it
    return swept


def is_gone(path: Path) -> bool:
    """Return whether the process that made the socket `path` has ended or executed another program. False if that
    cannot be seen."""
    try:
        lock = os.open(path.parent / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


def _is_abandoned(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return not _answers(path / SOCKET)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


def _answers(path: Path) -> bool:
    """Return whether a process listens; folders of old versions have no lock."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True
