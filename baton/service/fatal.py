"""End the process after an error that it cannot recover from: no memory is left, the device is lost or hangs, a rank is
lost, the gRPC server has failed. Its streams continue elsewhere. An operation that was refused memory has done an
unknown part of its work: fetches were seen to stop for good while the worker still reported that it served."""

import logging
import os

log = logging.getLogger(__name__)


def exit_if_out_of_memory(error: BaseException) -> None:
    """End the process if `error` is a MemoryError; otherwise do nothing."""
    if isinstance(error, MemoryError):
        exit_at_once("no memory is left, so this worker ends: a smaller --num-blocks, or a larger limit")


def exit_for_lost_device(reason: str) -> None:
    """End the process, since every request would fail in its CUDA context. The next process gets a new context."""
    exit_at_once(f"the GPU fails for good, so this worker ends: {reason}")


def exit_for_broken_engine(reason: str) -> None:
    """End the process, since the engine's thread has ended and no request would be answered."""
    exit_at_once(f"the engine cannot give back what a failed step held, so this worker ends: {reason}")


def exit_for_hung_device(silent_s: float) -> None:
    """End the process, since a kernel cannot be stopped: only the end of the process frees the GPU."""
    exit_at_once(f"the GPU has not finished a step for {silent_s:.0f} s, so this worker ends")


def exit_for_lost_rank(reason: str) -> None:
    """End the process, since the other ranks hold only their parts of the model."""
    exit_at_once(f"{reason}, so this worker ends with all its ranks")


def exit_at_once(message: str, level: int = logging.CRITICAL, status: int = 1) -> None:
    """Log `message` and end the process immediately, without waiting for its threads."""
    try:
        log.log(level, message)
        logging.shutdown()
    finally:
        os._exit(status)
