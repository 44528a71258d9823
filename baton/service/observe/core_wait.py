"""How long threads wait for a core, and how late an event loop is for that or for its own work."""

import asyncio
import threading
from time import monotonic as now
from typing import NamedTuple

from baton import system

_LEAST_S = 1.0  # between two looks
_TICK_S = 0.1
_KEPT = 0.95  # of the means, with each tick: they are of about the last two seconds


class CoreWait:
    """Counts from its making, then from one look to the next, the threads beside the one that made it: an engine's."""

    def __init__(self) -> None:
        self._own = threading.get_native_id()
        self._at, self._times = now(), system.run_and_wait_ns()
        self._share = 0.0

    def share(self) -> float:
        """Return the share of the time since the last look in which the thread that waited longest for a core did so, 0
        to 1; where that was less than a second ago, what it saw. 0 where the system does not tell."""
        if (at := now()) - self._at >= _LEAST_S:
            times = system.run_and_wait_ns()
            begun = {thread: self._times.get(thread, (0, 0))[1] for thread in times if thread != self._own}
            longest_ns = max((times[thread][1] - waited for thread, waited in begun.items()), default=0)
            self._share = min(1.0, longest_ns / 1e9 / (at - self._at))
            self._at, self._times = at, times
        return self._share


class LoopDelay(NamedTuple):
    """Seconds, in the mean, by which what an event loop should do at once is late."""

    core_s: float = 0.0  # since its thread waits for a core
    busy_s: float = 0.0  # since it does something else


class PathDelay(NamedTuple):
    """Seconds, in the mean, by which a message between two processes is late."""

    loop: LoopDelay = LoopDelay()
    network_s: float = 0.0

    def shares(self) -> tuple[float, float, float]:
        """Return the shares of core, event loop and network; all is the loop's where nothing was measured."""
        core_s, busy_s, network_s = *self.loop, self.network_s
        total_s = core_s + busy_s + network_s
        return (core_s / total_s, busy_s / total_s, network_s / total_s) if total_s > 0 else (0.0, 1.0, 0.0)


class EventLoopWatch:
    """Measure the delays of the running event loop: `run` as a task of it."""

    def __init__(self) -> None:
        self.delay = LoopDelay()

    async def run(self) -> None:
        """Measure, until cancelled."""
        thread = threading.get_native_id()
        at, (ran, waited) = now(), system.run_and_wait_ns(thread).get(thread, (0, 0))
        while True:
            await asyncio.sleep(_TICK_S)
            late_s = max(0.0, now() - at - _TICK_S)
            last_ran, last_waited = ran, waited
            at, (ran, waited) = now(), system.run_and_wait_ns(thread).get(thread, (0, 0))
            self._note(late_s, (ran - last_ran) / 1e9, (waited - last_waited) / 1e9)

    def _note(self, late_s: float, ran_s: float, waited_s: float) -> None:
        """Add a tick: it was late, and meanwhile the thread ran and waited for a core. Both happen in turns, so the
        delay is divided as they are."""
        wanted_s = ran_s + waited_s
        core_s = min(waited_s, late_s * waited_s / wanted_s) if wanted_s > 0 else 0.0
        old, new = self.delay, LoopDelay(core_s, late_s - core_s)
        self.delay = LoopDelay(*(_KEPT * was + (1 - _KEPT) * is_now for was, is_now in zip(old, new, strict=True)))
