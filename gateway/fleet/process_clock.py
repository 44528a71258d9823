"""A clock that pauses while this process does not run.

A gateway that was frozen or starved has received nothing meanwhile, which is not the workers' fault. So the time
between two ticks counts as two ticks at most, however late the second one comes.
"""

import asyncio
from collections.abc import Callable

from baton.service.clock import now

TICK_S = 0.25


async def follow_process_time(on_tick: Callable[[float], None]) -> None:
    """Call `on_tick(elapsed_s)`, with the seconds that this process has run since the last call, every TICK_S, until
    cancelled."""
    at = now()
    while True:
        await asyncio.sleep(TICK_S)
        last, at = at, now()
        on_tick(min(at - last, 2 * TICK_S))
