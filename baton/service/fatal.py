"""What a worker cannot go on after: no memory is left, the device is lost or hangs, a rank is gone. It ends at once,
and its streams continue elsewhere. What was refused memory is half done, and it is unknown which half: fetches were
seen to stop for good while the worker said that it served."""

import logging
import os

log = logging.getLogger(__name__)


def exit_if_out_of_memory(error: BaseException) -> None:
    """Does not return for a MemoryError; does nothing for any other."""
    if isinstance(error, MemoryError):
        exit_at_once("no memory is left, so this worker ends: a smaller --num-blocks, or a larger limit")


def exit_for_lost_device(reason: str) -> None:
    """Does not return. The process that follows has a context of its own; in this one every request would fail."""
    exit_at_once(f"the GPU fails for good, so this worker ends: {reason}")


def exit_for_broken_engine(reason: str) -> None:
    """Does not return. Its thread has ended: no request would be answered."""
    exit_at_once(f"the engine cannot give back what a failed step held, so this worker ends: {reason}")


def exit_for_hung_device(silent_s: float) -> None:
    """Does not return. A kernel cannot be stopped: only the end of the process takes the GPU back."""
    exit_at_once(f"the GPU has not finished a step for {silent_s:.0f} s, so this worker ends")


def exit_for_lost_rank(reason: str) -> None:
    """Does not return. The others have only their parts of the model."""
    exit_at_once(f"{reason}, so this worker ends with all its ranks")


def exit_at_once(message: str, level: int = logging.CRITICAL, status: int = 1) -> None:
    """Logs and ends the process at once, whatever its threads wait for."""
    try:
        log.log(level, message)
        logging.shutdown()
    finally:
        os._exit(status)
