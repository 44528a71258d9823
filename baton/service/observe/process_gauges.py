"""Gauges that every process has: of its log, its event loop and its memory."""

import sys

from baton import system
from baton.service import logs
from baton.service.observe.metrics import Gauge, num_tasks


def process_gauges() -> list[Gauge]:
    """Return them, read at each scrape."""
    return [
        Gauge("baton_log_lines_lost", "log lines that could not be written", logs.num_lost),
        Gauge("baton_tasks", "tasks of the event loop", num_tasks),
        # What grows for ever is in use; what only the resident size has grown by is held beyond.
        Gauge(
            "baton_heap_bytes", "memory that malloc has in use, and that it holds beyond", system.heap_bytes, "state"
        ),
        Gauge("baton_python_blocks", "small objects that Python has in use", sys.getallocatedblocks),
    ]
