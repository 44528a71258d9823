"""Measure how long threads wait for a core, and how late an event loop is for that reason or for its own work."""

import asyncio
import threading
from time import monotonic as now
from typing import NamedTuple

from baton import system

_LEAST_S = 1.0  # between two measurements
_TICK_S = 0.1
_KEPT = 0.95  # weight of the old means at each tick, so they cover about the last two seconds


class CoreWait:
    """Measures the threads other than the one that creates it: those of an engine. Each measurement covers the time
    since the previous one."""

    def __init__(self) -> None:
        self._own = threading.get_native_id()
        self._at, self._times = now(), system.run_and_wait_ns()
        self._share = 0.0

    def share(self) -> float:
        """Return the share of the time since the last measurement that the longest-waiting thread spent waiting for a
        core, 0 to 1. Within a second the last result is repeated. 0 if the system does not tell."""
        if (at := now()) - self._at >= _LEAST_S:
            times = system.run_and_wait_ns()
            begun = {thread: self._times.get(thread, (0, 0))[1] for thread in times if thread != self._own}
            longest_ns = max((times[thread][1] - waited for thread, waited in begun.items()), default=0)
            self._share = min(1.0, longest_ns / 1e9 / (at - self._at))
            self._at, self._times = at, times
        return self._share


class LoopDelay(NamedTuple):
    """Mean seconds by which an event loop is late with work that is ready."""

    core_s: float = 0.0  # its thread waits for a core
    busy_s: float = 0.0  # it does other work


class PathDelay(NamedTuple):
    """Mean seconds by which a message between two processes is late."""

    loop: LoopDelay = LoopDelay()
    network_s: float = 0.0

    def shares(self) -> tuple[float, float, float]:
        """Return the shares of core, event loop and network. If nothing was measured, the event loop has the whole
        share."""
        core_s, busy_s, network_s = *self.loop, self.network_s
        total_s = core_s + busy_s + network_s
        return (core_s / total_s, busy_s / total_s, network_s / total_s) if total_s > 0 else (0.0, 1.0, 0.0)


class EventLoopWatch:
    """Measure the delays of the running event loop; start `run` as one of its tasks."""

    def __init__(self) -> None:
        self.delay = LoopDelay()

    async def run(self) -> None:
        """Measure the delays, until cancelled."""
        thread = threading.get_native_id()
        at, (ran, waited) = now(), system.run_and_wait_ns(thread).get(thread, (0, 0))
        while True:
            await asyncio.sleep(_TICK_S)
            late_s = max(0.0, now() - at - _TICK_S)
            last_ran, last_waited = ran, waited
            at, (ran, waited) = now(), system.run_and_wait_ns(thread).get(thread, (0, 0))
            self._note(late_s, (ran - last_ran) / 1e9, (waited - last_waited) / 1e9)

    def _note(self, late_s: float, ran_s: float, waited_s: float) -> None:
        """Add one tick: how late it was, and how long the thread meanwhile ran and waited for a core. The lateness is
        divided in the proportion of the two."""
        wanted_s = ran_s + waited_s
        core_s = min(waited_s, late_s * waited_s / wanted_s) if wanted_s > 0 else 0.0
        old, new = self.delay, LoopDelay(core_s, late_s - core_s)
        self.delay = LoopDelay(*(_KEPT * was + (1 - _KEPT) * is_now for was, is_now in zip(old, new, strict=True)))
