"""No memory is left: the worker ends, and its streams go on elsewhere. What was refused memory is half done, and nobody
knows which half: fetches were seen to stand still for good while the worker said that it served."""

import logging
import os

log = logging.getLogger(__name__)


def leave_if_exhausted(error: BaseException) -> None:
    """Does not return for a MemoryError; nothing for any other."""
    if isinstance(error, MemoryError):
        try:
            log.critical("no memory is left, so this worker ends: a smaller --num-blocks, or a larger limit")
            logging.shutdown()
        finally:
            os._exit(1)
