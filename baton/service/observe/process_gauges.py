"""Gauges that every process has: of its log, event loop, memory and certificate."""

import sys

from baton import system
from baton.service import logs
from baton.service.observe.metrics import Gauge, num_tasks
from baton.service.security.tls import Tls


def process_gauges(tls: Tls | None) -> list[Gauge]:
    """Return the gauges, which are read at each scrape. `tls` holds the certificate of the process's ports."""

    def certificate_end() -> float | None:
        try:
            return None if tls is None else tls.ends_at()
        except (OSError, ValueError):  # never read yet, or a form that OpenSSL alone can read
            return None

    certificate_end()  # its first call takes a tenth of a second
    return [
        Gauge("baton_log_lines_lost", "log lines that could not be written", logs.num_lost),
        Gauge("baton_tasks", "tasks of the event loop", num_tasks),
        # Memory that grows for ever is in use; growth of the resident size alone is memory that malloc keeps.
        Gauge(
            "baton_heap_bytes", "memory that malloc has in use, and that it holds beyond", system.heap_bytes, "state"
        ),
        Gauge("baton_python_blocks", "small objects that Python has in use", sys.getallocatedblocks),
        Gauge(
            "baton_certificate_not_after_seconds", "when the process's certificate ends, since 1970", certificate_end
        ),
    ]
