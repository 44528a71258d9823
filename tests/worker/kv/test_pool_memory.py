"""The mirror of a pool on a GPU takes no more of the host's memory than it may."""

import asyncio
import mmap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton import system
from baton.worker.kv import pool_memory
from baton.worker.kv.pool_memory import GIB, PoolMemory, available_bytes, mirror_bytes
from kvtransfer.transfer.mirror_room import Side


@pytest.mark.parametrize("limit, wanted", [(16 * GIB, 8 * GIB), (2 * GIB, 2 * GIB)])
def test_what_is_available(tmp_path, monkeypatch, limit, wanted):
    (tmp_path / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 8388608 kB\n")
    monkeypatch.setattr(pool_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(system, "memory_limit", lambda: limit)
    assert available_bytes() == wanted


@pytest.mark.parametrize(
    "gib, available, num_gpus, wanted",
    [(None, 64 * GIB, 1, 10 * GIB), (None, 64 * GIB, 8, 4 * GIB), (None, 6 * GIB, 0, 3 * GIB), (0.5, 1, 1, GIB // 2)],
)
def test_what_a_mirror_may_take(gib, available, num_gpus, wanted):
    """Of a pool of 10 GiB; two workers of each GPU that take all of it leave none of them without."""
    assert mirror_bytes(10 * GIB, gib, available, num_gpus) == wanted


def test_the_bound_is_told_and_pages_are_given_back(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(pool_memory, "device_pool", lambda *given: "device")
    memory = PoolMemory(2 * mmap.PAGESIZE / GIB)
    memory.gpu_region = SimpleNamespace(close=lambda: None)
    layout = SimpleNamespace(block_bytes=mmap.PAGESIZE)
    whole = torch.zeros(4 * mmap.PAGESIZE, dtype=torch.uint8)
    pool = SimpleNamespace(whole=whole, bytes=whole, layout=layout, num_blocks=4)
    memory.mirror(pool)
    assert memory.device == "device" and "is mirrored in host memory: at most 0.00 of 0.00 GiB" in caplog.text

    async def main():
        for block in range(4):
            await memory.room.enter(Side.TAKER, np.array([block]))
            memory.region.memory[block * mmap.PAGESIZE] = 1
            memory.room.leave(Side.TAKER, np.array([block]))

    asyncio.run(main())
    assert [memory.region.memory[block * mmap.PAGESIZE] for block in range(4)] == [0, 0, 1, 1]
    assert memory.num_mirror_bytes == 2 * mmap.PAGESIZE
    memory.close()
