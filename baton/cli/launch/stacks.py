"""List the stacks of this user on this machine. Each writes its control address into a slot of a small file, and locks
the slot as long as its process lives, however it ends."""

import os
from pathlib import Path

from baton import system
from kvtransfer.transports.socket_folder import default_parent

_NUM_PLACES, _PLACE_BYTES = 64, 256


class StackNote:
    """The entry of one stack in the file, until `close` or the end of its process."""

    def __init__(self, address: str, folder: Path | None = None):
        """Write the entry. `folder`: of the file; None: the folder in which workers find each other. Raises OSError,
        also if there is no free slot."""
        words = address.encode().ljust(_PLACE_BYTES, b"\0")
        self._fd = _open(folder)
        places = (place for place in range(_NUM_PLACES) if system.lock_byte(self._fd, place))
        if len(words) > _PLACE_BYTES or (place := next(places, None)) is None:
            self.close()
            raise OSError(f"a place has {_PLACE_BYTES} bytes, and there are {_NUM_PLACES}")
        os.pwrite(self._fd, words, place * _PLACE_BYTES)

    def close(self) -> None:
        """Free the slot."""
        os.close(self._fd)


def noted_stacks(folder: Path | None = None) -> list[str]:
    """Return the control addresses of the running stacks. Raises OSError."""
    fd, found = _open(folder), list[str]()
    try:
        for place in range(_NUM_PLACES):
            address = os.pread(fd, _PLACE_BYTES, place * _PLACE_BYTES).rstrip(b"\0")
            if address and system.is_byte_locked(fd, place):  # otherwise its stack has ended
                found.append(address.decode(errors="replace"))
    finally:
        os.close(fd)
    return found


def _open(folder: Path | None) -> int:
    """Open the file, and return its descriptor. Raises OSError."""
    return system.open_own((folder or default_parent()) / f"baton-stacks-{os.getuid()}")
