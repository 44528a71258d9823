"""Provide what Linux has and other systems do differently: memory that processes share, the user of a socket's other
end, cores, sizes, the boot id, and the end of a child with its parent.

Everything here has an alternative of POSIX or macOS. Only Linux was ever tried; tests choose the alternatives on Linux,
as far as it has them."""

import _posixshmem  # pyright: ignore[reportMissingImports]
import ctypes
import fcntl
import glob
import mmap
import os
import resource
import secrets
import socket
import struct
import sys
import termios
import uuid
from functools import cache
from pathlib import Path
from typing import NamedTuple

LINUX = sys.platform == "linux"
PAGE = mmap.PAGESIZE
_MADV_DONTNEED, _MADV_REMOVE = 4, 9
_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

# Executes the program that its arguments name. On Linux it asks the kernel to kill that program with its parent; other
# systems cannot, so there a worker whose parent was killed has to be ended by hand. Not a preexec_fn: that runs between
# fork and exec, where children of a process with gRPC's threads were seen to die of SIGSEGV and SIGABRT.
RUN_WITH_PARENT = """
import ctypes, os, signal, sys
parent, *argv = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(parent):
    sys.exit(1)
try:
    os.execvp(argv[0], argv)
except OSError as error:
    sys.exit(f"{argv[0]}: {error.strerror}")
"""


def with_home(path: str) -> Path:
    """Expand `~` as the first part of a path. For a user without a home directory it becomes /nonexistent, as in
    Debian; `~NAME` of an unknown user stays, as in shells."""
    expanded = Path(os.path.expanduser(path))
    return Path("/nonexistent", *expanded.parts[1:]) if expanded.parts[:1] == ("~",) else expanded


def cores() -> list[int]:
    """Return the cores that this process may use, in order."""
    return sorted(os.sched_getaffinity(0)) if LINUX else list(range(os.cpu_count() or 1))


class CpuQuota(NamedTuple):
    """The number of whole cores that a group of processes may use, and an id of the group that is unique on this
    host."""

    cores: int
    group: int


def cpu_quota() -> CpuQuota | None:
    """Return the smallest quota of cores among this process's group and the groups around it; None if there is no
    quota."""
    found = None
    for folder in _cgroups("cpu"):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            cores = -(-int(quota) // int(period))
        except (OSError, ValueError):  # the root group has no such file; or it says "max"
            continue
        if cores > 0 and (found is None or cores <= found.cores):
            found = CpuQuota(cores, folder.stat().st_ino)
    return found


def throttled_periods() -> tuple[int, int]:
    """Return (periods in which the group with the quota was throttled, periods in which it computed); zeros without a
    quota."""
    group = quota.group if (quota := cpu_quota()) is not None else None
    for folder in _cgroups("cpu"):
        if folder.exists() and folder.stat().st_ino == group:
            counts = _counts(folder / "cpu.stat")
            return counts.get("nr_throttled", 0), counts.get("nr_periods", 0)
    return 0, 0


def num_cores() -> int:
    """Return how many threads of this process can run at the same time."""
    quota = cpu_quota()
    return len(cores()) if quota is None else min(len(cores()), quota.cores)


def numa_nodes(pid: int) -> list[int]:
    """Return the NUMA nodes whose cores a process may use, in order; none on other systems and on kernels without
    nodes."""
    allowed = os.sched_getaffinity(pid) if LINUX else set()
    found = []
    for path in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"):
        ranges = [part.partition("-") for part in path.read_text().strip().split(",") if part]
        own = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
        if own & allowed:
            found.append(int(path.parent.name.removeprefix("node")))
    return sorted(found)


def shared_memory(num_bytes: int) -> tuple[int, int]:
    """Create an anonymous file of zeros whose size can never change; return a descriptor that can write, and one for
    other processes that can only read. Raises OSError."""
    if not LINUX:
        return _posix_memory(num_bytes)
    fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(fd)
        raise


def reserve(fd: int, num_bytes: int) -> None:
    """Give a file at least this size, and on Linux allocate its space: storing to a mapping of a hole raises SIGBUS if
    the file system is full. Raises OSError."""
    if LINUX:
        os.posix_fallocate(fd, 0, num_bytes)
    elif os.fstat(fd).st_size < num_bytes:
        os.ftruncate(fd, num_bytes)


def give_back_pages(address: int, num_bytes: int) -> None:
    """Free the whole pages within these bytes of this process's memory. They read as zeros afterwards, also in other
    mappings of the file. Linux only."""
    first = -(-address // PAGE) * PAGE
    length = (address + num_bytes) // PAGE * PAGE - first
    if length > 0:
        madvise, where = ctypes.CDLL(None).madvise, (ctypes.c_void_p(first), ctypes.c_size_t(length))
        if madvise(*where, _MADV_REMOVE):  # fails for memory that has no file
            madvise(*where, _MADV_DONTNEED)


def trim_heap() -> None:
    """Return memory that malloc holds unused to the system, if malloc is glibc's."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc. `hblkhd`: bytes in mapped blocks, `uordblks`: used in heaps, `fordblks`: free in
    heaps."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def _mallinfo():
    """Return mallinfo2, or None if the C library lacks it (glibc before 2.33, musl)."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.argtypes, function.restype = (), _MallInfo
    return function


def heap_bytes() -> dict[str, int]:
    """Return the bytes that malloc has `used` and holds `free`; empty if it does not tell. This takes 17 ms with
    100,000 free pieces, which it counts."""
    if (function := _mallinfo()) is None:
        return {}
    info = function()
    return {"used": info.uordblks + info.hblkhd, "free": info.fordblks}


def keeps_its_size(fd: int) -> bool:
    """Return whether a file from another process cannot shrink, so that a reader of its mapping never gets SIGBUS. On
    other systems return True: there it cannot be asked, and macOS lets the size of shared memory be set only once."""
    if not LINUX:
        return True
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # the file has no seals
        return False


def open_own(path: Path) -> int:
    """Open a file to read and write, in a folder where other users may write too; make it where there is none. Raises
    OSError, also where it is another user's, who could cut it short while it is mapped (SIGBUS)."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if os.fstat(fd).st_uid != os.getuid():
        os.close(fd)
        raise PermissionError(f"{path} is another user's")
    return fd


def lock_byte(fd: int, at: int) -> bool:
    """Lock a byte of a file until this descriptor is closed; return False if another process holds it. On other systems
    than Linux the lock belongs to the process, and ends when any descriptor of the file is closed."""
    try:
        if LINUX:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0))
        else:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
    except OSError:
        return False
    return True


def unlock_byte(fd: int, at: int) -> None:
    """Unlock a byte that `lock_byte` has locked."""
    if LINUX:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_UNLCK, os.SEEK_SET, at, 1, 0))
    else:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, at)


def is_byte_locked(fd: int, at: int) -> bool:
    """Return whether another process holds a byte that `lock_byte` locks; on Linux without locking it for a moment."""
    if LINUX:
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        return struct.unpack("hhqqi", fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK
    if is_free := lock_byte(fd, at):
        unlock_byte(fd, at)
    return not is_free


def user_behind(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a unix socket. Raises OSError."""
    if LINUX:
        return struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]
    # LOCAL_PEERCRED of SOL_LOCAL: struct xucred begins with its version and the user id.
    return struct.unpack_from("2I", sock.getsockopt(0, 1, 76))[1]


def num_unacknowledged(sock: socket.socket) -> int:
    """Return how many bytes written to a TCP connection the other side has not acknowledged (tcp(7), SIOCOUTQ); 0 if
    that is unknown or the connection is closed."""
    num = bytearray(4)
    try:
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, num)
    except (OSError, ValueError):
        return 0
    return int.from_bytes(num, sys.byteorder)


def run_and_wait_ns(thread_id: int | None = None, pid: int | None = None) -> dict[int, tuple[int, int]]:
    """Return for each thread id (all threads of a process, by default this one, or one thread) the nanoseconds for
    which it has run and has waited for a core. Empty on other systems, and if the kernel does not count them."""
    found = glob.glob(f"/proc/{pid or 'self'}/task/{thread_id or '*'}/schedstat") if LINUX else []
    rows = {path: _text_of(path).split() for path in found}
    return {int(path.split("/")[4]): (int(row[0]), int(row[1])) for path, row in rows.items() if row}


def memory_bytes() -> int:
    """Return the size of this process's address space; on other systems its peak resident size. Raises OSError."""
    if LINUX:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_limit() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its container's limit if that is less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                sizes.append(int((folder / name).read_text()))
            except (OSError, ValueError):  # another version of cgroups, or "max"
                continue
    return min(sizes)


class GroupEvents(NamedTuple):
    """How often a limit of a group of processes took effect: the kernel killed a process for lack of memory, or refused
    a new thread or process."""

    num_killed: int
    num_refused: int


def group_events() -> GroupEvents:
    """Return the events so far in this process's group, which includes its children; zeros if they are not counted."""
    killed = _count_of("oom_kill", "memory", "memory.events", "memory.oom_control")
    return GroupEvents(killed, _count_of("max", "pids", "pids.events"))


def name_thread(name: str) -> None:
    """Name this thread, and threads that it starts, for tools that list threads; at most 15 characters."""
    if LINUX:
        ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME


def thread_times(pid: int) -> dict[str, float]:
    """Return the seconds of CPU time of a process's living threads, by name, summed over threads of one name; nothing
    on other systems. Raises OSError."""
    seconds: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir() if LINUX else ():
        try:
            name, times = (task / "comm").read_text().strip(), (task / "schedstat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            continue
        seconds[name] = seconds.get(name, 0.0) + int(times.split()[0]) / 1e9
    return seconds


def boot_id() -> str:
    """Return an id that is equal for two processes exactly when one kernel runs them. Raises OSError."""
    if LINUX:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    size, value = ctypes.c_size_t(37), ctypes.create_string_buffer(37)
    if ctypes.CDLL(None, use_errno=True).sysctlbyname(b"kern.bootsessionuuid", value, ctypes.byref(size), None, 0):
        raise OSError(ctypes.get_errno(), "kern.bootsessionuuid cannot be read")
    return str(uuid.UUID(value.value.decode()))


def _cgroups(controller: str) -> list[Path]:
    """Return the folders of this process's groups, the innermost first, as far as they are mounted: of cgroups version
    2, and of version 1 for this controller. In a container, its own group is at the mount point."""
    folders = []
    for line in _text_of(str(_OWN_CGROUPS)).splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root, parts = _CGROUPS / controller if names else _CGROUPS, path.strip("/").split("/")
        folders += [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders


def _count_of(event: str, controller: str, *names: str) -> int:
    """Return a count from the first of these files that exists, beginning with the innermost group."""
    found = (_counts(folder / name) for folder in _cgroups(controller) for name in names)
    return next(filter(None, found), {}).get(event, 0)


def _counts(path: Path) -> dict[str, int]:
    """Return the counts in a file with a name and a count on each line; skip other lines."""
    lines = map(str.split, _text_of(str(path)).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # there is no such file, or its thread has ended
        return ""


def _posix_memory(num_bytes: int) -> tuple[int, int]:
    name = f"/baton-{secrets.token_hex(8)}"  # macOS takes 31 characters
    fd = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        os.ftruncate(fd, num_bytes)
        return fd, _posixshmem.shm_open(name, os.O_RDONLY, mode=0o600)
    except BaseException:
        os.close(fd)
        raise
    finally:
        _posixshmem.shm_unlink(name)
