"""Carry outputs from the engine's thread to the event loop: tokens together, everything else at once."""

import asyncio
import threading
from collections.abc import Callable, Sequence

from baton.engine.core.request import Output, TokenRun

# A small model decodes a step in 0.4 ms; waking the event loop for each took twice that, under the interpreter's lock.
GAP_S = 0.002


class ThreadBridge:
    """`put` is called on the engine's thread, `deliver` on the event loop, in the order of `put`."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[Output]], None]):
        self._event_loop, self._deliver = event_loop, deliver
        self._lock = threading.Lock()
        self._outputs: list[Output] = []
        self._is_idle = True  # no timer runs that would look for outputs
        self._timer: asyncio.TimerHandle | None = None

    def put(self, outputs: Sequence[Output]) -> None:
        """Deliver outputs; tokens wait GAP_S at most behind the last delivery."""
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
