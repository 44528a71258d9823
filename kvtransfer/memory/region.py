"""Memory that another process can map: an anonymous file whose size can never change."""

import mmap
import os

from baton import system
from kvtransfer.errors import PeerLost, ProtocolError


class Region:
    """`memory` is the mapping, `fd` the file behind it. Sealed against resizing, so a reader never meets SIGBUS."""

    def __init__(self, fd: int, mapping: mmap.mmap, read_only: int = -1):
        """read_only: a descriptor of the same file that cannot write, to hand out."""
        self.fd, self._read_only = fd, read_only
        self.memory = memoryview(mapping)
        self._mapping = mapping

    @classmethod
    def create(cls, num_bytes: int) -> "Region":
        """Writable and zeroed. Raises ValueError for a size below 1, OSError, one line, when there is no memory."""
        if num_bytes < 1:
            raise ValueError(f"a region of {num_bytes} bytes: at least 1")
        try:
            fd, read_only = system.shared_memory(num_bytes)
            try:
                return cls(fd, mmap.mmap(fd, num_bytes), read_only)
            except BaseException:
                os.close(fd)
                os.close(read_only)
                raise
        except OSError as error:
            raise OSError(f"no room for KV of {num_bytes / 2**20:.1f} MiB in memory: {error.strerror}") from error

    @classmethod
    def map(cls, fd: int, num_bytes: int) -> "Region":
        """Another process's region, read-only; takes the descriptor over. Raises ProtocolError for what is none,
        PeerLost where it cannot be mapped now; then `fd` is closed."""
        try:
            size = os.fstat(fd).st_size
            if num_bytes < 1 or size < num_bytes:
                raise ProtocolError(f"the file sent for the pool has {size} bytes, {num_bytes} were announced")
            if not system.keeps_its_size(fd):
                raise ProtocolError("the file sent for the pool is not sealed against shrinking")
            return cls(fd, mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ))
        except OSError as error:
            os.close(fd)
            raise PeerLost(f"the source's pool cannot be mapped here: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise

    def discard(self, begin: int, num_bytes: int) -> None:
        """Give the whole pages within these bytes back to the system; they read as zeros then, in all mappings. Raises
        OSError where the system cannot."""
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if (length := (begin + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first) > 0:
            self._mapping.madvise(mmap.MADV_REMOVE, first, length)

    def open_read_only(self) -> int:
        """Return a descriptor to hand out: a taker that maps it cannot write by accident. The caller closes it."""
        return os.dup(self._read_only)

    def close(self) -> None:
        """Idempotent. While arrays still look into the mapping it stays until the last of them is gone."""
        if self.fd < 0:
            return
        for fd in {self.fd, self._read_only} - {-1}:
            os.close(fd)
        self.fd = self._read_only = -1
        try:
            self.memory.release()
            self._mapping.close()
        except BufferError:
            pass  # an array still exports the mapping; its end unmaps
