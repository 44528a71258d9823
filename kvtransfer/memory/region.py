"""Memory that another process can map: an anonymous file whose size can never change."""

import fcntl
import mmap
import os

from kvtransfer.errors import ProtocolError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Region:
    """`memory` is the mapping, `fd` the file behind it. Sealed against resizing, so a reader never meets SIGBUS."""

    def __init__(self, fd: int, mapping: mmap.mmap):
        self.fd = fd
        self.memory = memoryview(mapping)
        self._mapping = mapping

    @classmethod
    def create(cls, num_bytes: int) -> "Region":
        """Writable and zeroed. Raises ValueError for a size below 1, OSError, one line, when there is no memory."""
        if num_bytes < 1:
            raise ValueError(f"a region of {num_bytes} bytes: at least 1")
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, mmap.mmap(fd, num_bytes))
        except OSError as exc:
            os.close(fd)
            raise OSError(f"no room for KV of {num_bytes / 2**20:.1f} MiB in memory: {exc.strerror}") from exc
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def map(cls, fd: int, num_bytes: int) -> "Region":
        """Another process's region, read-only; takes the descriptor over. Raises ProtocolError, then `fd` is closed."""
        try:
            size = os.fstat(fd).st_size
            if num_bytes < 1 or size < num_bytes:
                raise ProtocolError(f"the file sent for the pool has {size} bytes, {num_bytes} were announced")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ProtocolError("the file sent for the pool is not sealed against shrinking")
            return cls(fd, mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ))
        except OSError as exc:
            os.close(fd)
            raise ProtocolError(f"the file sent for the pool cannot be mapped: {exc}") from exc
        except BaseException:
            os.close(fd)
            raise

    def open_read_only(self) -> int:
        """A descriptor to hand out: a taker that maps it cannot write by accident. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Idempotent. While arrays still look into the mapping it stays until the last of them is gone."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self.memory.release()
            self._mapping.close()
        except BufferError:
            pass  # an array still exports the mapping; its end unmaps
