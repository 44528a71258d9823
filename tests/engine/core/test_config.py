"""What is left open of an engine's options, and what it becomes for one model."""

import pytest

from baton import system
from baton.engine.core import config
from baton.engine.models.registry import read_spec
from tests.support.process import ROOT

MIB = 1 << 20


@pytest.mark.parametrize("limit, wanted", [(64 * MIB, 8 * MIB), (1 << 50, config.MAX_POOL_BYTES)])
def test_a_pool_is_an_eighth_of_what_the_container_may_have(monkeypatch, limit, wanted):
    """Not of the machine: a container is ended for what it takes beyond its limit."""
    monkeypatch.setattr(system, "memory_limit", lambda: limit)
    layout = read_spec(ROOT / "demo" / "target").kv_layout("bf16", 32)
    assert config.default_num_blocks(layout, 100_000, 2048) == wanted // layout.block_bytes
