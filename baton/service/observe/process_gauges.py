"""Gauges that every process has: of its log, its event loop, its memory and its certificate."""

import sys

from baton import system
from baton.service import logs
from baton.service.observe.metrics import Gauge, num_tasks
from baton.service.security.tls import Tls


def process_gauges(tls: Tls | None) -> list[Gauge]:
    """Return them, read at each scrape. `tls`: of its ports."""

    def certificate_end() -> float | None:
        try:
            return None if tls is None else tls.ends_at()
        except (OSError, ValueError):  # what was never read, and what OpenSSL alone can read
            return None

    certificate_end()  # its first call takes a tenth of a second
    return [
        Gauge("baton_log_lines_lost", "log lines that could not be written", logs.num_lost),
        Gauge("baton_tasks", "tasks of the event loop", num_tasks),
        # What grows for ever is in use; what only the resident size has grown by is held beyond.
        Gauge(
            "baton_heap_bytes", "memory that malloc has in use, and that it holds beyond", system.heap_bytes, "state"
        ),
        Gauge("baton_python_blocks", "small objects that Python has in use", sys.getallocatedblocks),
        Gauge(
            "baton_certificate_not_after_seconds", "when the process's certificate ends, since 1970", certificate_end
        ),
    ]
