"""A gateway gives back what a burst took."""

import asyncio

from baton import system
from baton.service import heap


async def test_it_is_trimmed_again_and_again(monkeypatch):
    monkeypatch.setattr(heap, "TRIM_EVERY_S", 0.001)
    trimmed = asyncio.Event()
    calls = []

    def trim() -> None:
        calls.append(None)
        if len(calls) == 3:
            loop.call_soon_threadsafe(trimmed.set)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(system, "trim_heap", trim)
    task = asyncio.create_task(heap.keep_trimmed())
    async with asyncio.timeout(10):
        await trimmed.wait()
    task.cancel()
