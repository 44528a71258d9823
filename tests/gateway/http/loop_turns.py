"""How often others had their turn of the event loop."""

import asyncio
from collections.abc import Awaitable


async def turns(work: Awaitable[bytes]) -> tuple[bytes, int]:
    """Return what becomes of the work, and how often another task had its turn meanwhile."""
    num_turns, is_over = 0, False

    async def take_turns() -> None:
        nonlocal num_turns
        while not is_over:
            num_turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(take_turns())
    written = await work
    is_over = True
    await others
    return written, num_turns
