"""Allocate memory that another process can map: an anonymous file of fixed size."""

import mmap
import os

from baton import system
from kvtransfer.errors import PeerLost, ProtocolError


class Region:
    """Own the mapping `memory` of the file `fd`. The file is sealed against resizing, so a reader never gets SIGBUS."""

    def __init__(self, fd: int, mapping: mmap.mmap, read_only: int = -1):
        """Own `fd` and `mapping`; `read_only`: a descriptor of the same file that cannot write, for other processes."""
        self.fd, self._read_only = fd, read_only
        self.memory = memoryview(mapping)
        self._mapping = mapping

    @classmethod
    def create(cls, num_bytes: int) -> "Region":
        """Create a writable, zeroed region. Raises ValueError for a size below 1, OSError (one line) when there is no
        memory."""
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
        """Map another process's region read-only, and own its descriptor `fd`. Raises ProtocolError for a file that is
        no region, PeerLost if it cannot be mapped now; `fd` is then closed."""
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
        """Free the whole pages within these bytes; they then read as zeros in all mappings. Raises OSError if the
        system cannot."""
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if (length := (begin + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first) > 0:
            self._mapping.madvise(mmap.MADV_REMOVE, first, length)

    def open_read_only(self) -> int:
        """Return a descriptor for another process, which cannot write through it. The caller closes it."""
        return os.dup(self._read_only)

    def close(self) -> None:
        """Close the region. Idempotent. The mapping stays until the last array that uses it is freed."""
        if self.fd < 0:
            return
        for fd in {self.fd, self._read_only} - {-1}:
            os.close(fd)
        self.fd = self._read_only = -1
        try:
            self.memory.release()
            self._mapping.close()
        except BufferError:
            pass  # an array still uses the mapping, and unmaps it when freed
