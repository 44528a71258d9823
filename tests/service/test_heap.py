"""A gateway gives back what a burst took."""

import asyncio
import ctypes

import psutil
import pytest

from baton.service import heap
from tests.support.waiting import until_async


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="malloc is not glibc's")
async def test_what_each_burst_took_is_given_back(monkeypatch):
    """Of 64 MiB in pieces of 10,000 bytes the last stays, behind which malloc by itself gives nothing back."""
    monkeypatch.setattr(heap, "TRIM_EVERY_S", 0.001)
    trimming = asyncio.create_task(heap.keep_trimmed())
    for _ in range(2):
        pieces = [bytes(10_000) for _ in range(6_700)]
        held = resident_bytes()
        del pieces[:-1]
        await until_async(lambda held=held: held - resident_bytes() > 40 << 20, "the heap is trimmed")
    trimming.cancel()
