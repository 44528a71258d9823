"""A clock that pauses while this process does.

A gateway that was frozen or starved has received nothing for a while, which is not the workers' fault: a tick counts
for two at most, however late it comes.
"""

import asyncio
from collections.abc import Callable

from baton.service.clock import now

TICK_S = 0.25


async def follow_process_time(on_tick: Callable[[float], None]) -> None:
    """Call `on_tick(seconds that this process has run)` every TICK_S, until cancelled."""
    running_s, at = 0.0, now()
    while True:
        await asyncio.sleep(TICK_S)
        last, at = at, now()
        running_s += min(at - last, 2 * TICK_S)
        on_tick(running_s)
