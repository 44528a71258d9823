"""Return the free memory that malloc keeps to the system, for instance after a burst."""

import asyncio
from typing import NoReturn

from baton import system

TRIM_EVERY_S = 60.0  # a trim takes some milliseconds of a thread: 2 with 100 MiB in pieces of 1 to 10 KB


async def keep_trimmed() -> NoReturn:
    """Trim the heap every minute, until cancelled."""
    while True:
        await asyncio.sleep(TRIM_EVERY_S)
        await asyncio.to_thread(system.trim_heap)
