"""Carry outputs from the engine's thread to the event loop: tokens in batches, everything else without delay."""

import asyncio
import threading
from collections.abc import Callable, Sequence

from baton.engine.core.request import Output, TokenRun

# A small model decodes a step in 0.4 ms. Waking the event loop for each step took twice that, holding Python's lock.
GAP_S = 0.002


class ThreadBridge:
    """Pass outputs from `put`, called on the engine's thread, to `deliver`, called on the event loop, in order."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[Output]], None]):
        self._event_loop, self._deliver = event_loop, deliver
        self._lock = threading.Lock()
        self._outputs: list[Output] = []
        self._is_idle = True  # whether no timer runs that would deliver the next outputs
        self._timer: asyncio.TimerHandle | None = None

    def put(self, outputs: Sequence[Output]) -> None:
        """Deliver outputs; tokens are delivered GAP_S after the last delivery at the latest."""
        is_urgent = not all(isinstance(output, TokenRun) for output in outputs)
        with self._lock:
            self._outputs += outputs
            if not (self._is_idle or is_urgent):
                return
            self._is_idle = False
        self._event_loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            outputs, self._outputs = self._outputs, []
            self._is_idle = not outputs
        if outputs:
            self._timer = self._event_loop.call_later(GAP_S, self._drain)
            self._deliver(outputs)
