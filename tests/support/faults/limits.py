"""Limits that a running process gets and loses again. The kernel keeps them, so no test needs to be root."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.support.process import Process


@contextmanager
def limited(process: Process, resource: int, soft: int) -> Iterator[None]:
    """Limit a resource of the process meanwhile. `resource`: one of psutil.RLIMIT_*."""
    seen = psutil.Process(process.pid)
    before = seen.rlimit(resource)
    seen.rlimit(resource, (soft, before[1]))
    try:
        yield
    finally:
        if process.alive:
            seen.rlimit(resource, before)


def full_disk(process: Process):
    """Let no file of the process grow any more; pipes and sockets are as before."""
    return limited(process, psutil.RLIMIT_FSIZE, 0)
