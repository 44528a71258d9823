"""Sizes of bench/index.py are those that the memory allows, whatever of it earlier sizes have taken."""

from types import SimpleNamespace

import pytest

from bench import index


@pytest.mark.parametrize("filled", [0, 1_000_000, 10_000_000])
def test_what_is_filled_already_takes_nothing_from_what_is_affordable(monkeypatch, filled):
    free = 8 << 30
    left = SimpleNamespace(available=free - filled * index.ENTRY_BYTES)
    monkeypatch.setattr(index.psutil, "virtual_memory", lambda: left)
    most = free // 2 // index.ENTRY_BYTES
    assert most - index.RUN < index.affordable(50_000_000, filled) <= most
    assert index.affordable(1_000_000, filled) == 1_000_000 // index.RUN * index.RUN
