"""List the stacks of this user on this machine. Each writes its control address into a slot of a small file, and locks
the slot as long as its process lives, however it ends."""

import os

from baton import system
from kvtransfer.transports.socket_folder import default_parent

_NUM_SLOTS, _SLOT_BYTES = 64, 256


class StackNote:
    """The entry of one stack in the file, until `close` or the end of its process."""

    def __init__(self, address: str):
        """Write the entry. Raises OSError, also if there is no free slot."""
        entry = address.encode().ljust(_SLOT_BYTES, b"\0")
        self._fd = _open()
        slots = (slot for slot in range(_NUM_SLOTS) if system.lock_byte(self._fd, slot))
        if len(entry) > _SLOT_BYTES or (slot := next(slots, None)) is None:
            self.close()
            raise OSError(f"a slot has {_SLOT_BYTES} bytes, and there are {_NUM_SLOTS}")
        os.pwrite(self._fd, entry, slot * _SLOT_BYTES)

    def close(self) -> None:
        """Free the slot."""
        os.close(self._fd)


def noted_stacks() -> list[str]:
    """Return the control addresses of the running stacks. Raises OSError."""
    fd, found = _open(), list[str]()
    try:
        for slot in range(_NUM_SLOTS):
            address = os.pread(fd, _SLOT_BYTES, slot * _SLOT_BYTES).rstrip(b"\0")
            if address and system.is_byte_locked(fd, slot):  # otherwise its stack has ended
                found.append(address.decode(errors="replace"))
    finally:
        os.close(fd)
    return found


def _open() -> int:
    """Open the file, in the folder in which workers find each other, and return its descriptor. Raises OSError."""
    return system.open_own(default_parent() / f"baton-stacks-{os.getuid()}")
