"""Report the phase of a slow start: one line on stderr, `starting: decode worker: importing torch`."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "starting: "  # a keeper that holds back a child's stderr lets these pass
QUIET_S = 1.0


@contextmanager
def phase(who: str, what: str, quiet_s: float = QUIET_S) -> Iterator[None]:
    """Print the phase once the block has taken `quiet_s`."""
    timer = threading.Timer(quiet_s, print, (f"{PREFIX}{who}: {what}",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
