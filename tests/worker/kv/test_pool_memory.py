"""Warn where the mirror of a pool on a GPU could outgrow the memory of the host."""

from types import SimpleNamespace

import pytest
import torch

from baton.worker.kv import pool_memory
from baton.worker.kv.pool_memory import GIB, PoolMemory, available_bytes


@pytest.mark.parametrize("limit, wanted", [("max", 8 * GIB), (str(2 * GIB), 2 * GIB), (None, 8 * GIB)])
def test_what_is_available(tmp_path, monkeypatch, limit, wanted):
    (tmp_path / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 8388608 kB\n")
    if limit is not None:
        (tmp_path / "limit").write_text(limit + "\n")
    monkeypatch.setattr(pool_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(pool_memory, "LIMITS", (tmp_path / "limit", tmp_path / "none"))
    assert available_bytes() == wanted


@pytest.mark.parametrize("available, is_told", [(1 << 20, False), (100, True)])
def test_a_mirror_that_is_too_large_is_told(monkeypatch, caplog, available, is_told):
    monkeypatch.setattr(pool_memory, "available_bytes", lambda: available)
    monkeypatch.setattr(pool_memory, "device_pool", lambda *given: "device")
    memory = PoolMemory()
    memory.gpu_region = SimpleNamespace(close=lambda: None)
    memory.mirror(SimpleNamespace(bytes=torch.zeros(4096, dtype=torch.uint8)))
    assert memory.device == "device" and ("mirrored in host memory" in caplog.text) == is_told
    memory.close()
