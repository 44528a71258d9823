"""No memory is left, or the device is lost or hangs: the worker ends, and its streams continue elsewhere. What was refused
memory is half done, and it is unknown which half: fetches were seen to stop for good while the worker said that it
served."""

import logging
import os

log = logging.getLogger(__name__)


def leave_if_exhausted(error: BaseException) -> None:
    """Does not return for a MemoryError; does nothing for any other."""
    if isinstance(error, MemoryError):
        leave("no memory is left, so this worker ends: a smaller --num-blocks, or a larger limit")


def leave_for_lost_device(reason: str) -> None:
    """Does not return. The process that follows has a context of its own; in this one every request would fail."""
    leave(f"the GPU fails for good, so this worker ends: {reason}")


def leave_for_broken_engine(reason: str) -> None:
    """Does not return. Its thread has ended: no request would be answered."""
    leave(f"the engine cannot give back what a failed step held, so this worker ends: {reason}")


def leave_for_hung_device(silent_s: float) -> None:
    """Does not return. A kernel cannot be stopped: only the end of the process takes the GPU back."""
    leave(f"the GPU has not finished a step for {silent_s:.0f} s, so this worker ends")


def leave_for_lost_rank(reason: str) -> None:
    """Does not return. The others have only their parts of the model."""
    leave(f"{reason}, so this worker ends with all its ranks")


def leave(message: str, level: int = logging.CRITICAL, status: int = 1) -> None:
    """Logs and ends the process at once, whatever its threads wait for."""
    try:
        log.log(level, message)
        logging.shutdown()
    finally:
        os._exit(status)
