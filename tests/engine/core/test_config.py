"""What is left open of an engine's options, and what it becomes for one model."""

import re
from pathlib import Path

import pytest

from baton import system
from baton.engine.core import config
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import set_threads
from baton.engine.models.registry import read_spec
from kvtransfer import wire
from tests.support.process import ROOT

MIB = 1 << 20


@pytest.mark.parametrize(
    "limit, num_workers, wanted",
    [
        (64 * MIB, 1, 8 * MIB),
        (64 * MIB, 2, 8 * MIB),
        (64 * MIB, 8, 2 * MIB),
        (1 << 50, 1, config.MAX_POOL_BYTES),
    ],
)
def test_a_pool_is_an_eighth_of_what_the_container_may_have(monkeypatch, limit, num_workers, wanted):
    """Not of the machine: a container is ended for what it takes beyond its limit. Of more than two workers all have a
    quarter."""
    monkeypatch.setattr(system, "memory_limit", lambda: limit)
    layout = read_spec(ROOT / "demo" / "target").kv_layout("bf16", 32)
    settings = EngineConfig(
        Path("m"), max_num_seqs=100_000, max_num_batched_tokens=200_000, workers_per_host=num_workers
    )
    assert config.default_num_blocks(layout, settings, 2048) == wanted // layout.block_bytes


@pytest.mark.parametrize(
    "given, words",
    [
        ({"num_blocks": 10**26}, f"num_blocks {10**26}: must be at most 2147483647"),
        ({"max_num_batched_tokens": 10**12}, f"max_num_batched_tokens {10**12}: must be at most 2147483647"),
        ({"threads": 1 << 31}, "threads 2147483648: must be at most 2147483647"),
        ({"block_size": 131_072}, "block_size 131072: must be at most 65536"),
        ({"max_model_len": 1}, "max_model_len 1: must be at least 2, a token to read and one to answer"),
        ({"num_blocks": 1, "block_size": 1}, "num_blocks 1: with block_size 1 at least 2, a token to read and one to"),
    ],
)
def test_what_no_request_could_be_served_with_is_refused(given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        EngineConfig(Path("m"), **given)


def test_the_largest_block_is_one_that_a_layout_of_kv_can_name():
    assert config.MAX_BLOCK_SIZE == wire._MAX_DIMENSION
    assert EngineConfig(Path("m"), block_size=config.MAX_BLOCK_SIZE)


def test_more_threads_than_the_cores_could_ever_run_are_refused(monkeypatch):
    """They spin for each other: 5,000 on 2 cores had not started a worker within a minute."""
    monkeypatch.setattr(system, "num_cores", lambda: 2)
    with pytest.raises(ValueError, match="threads 5000: must be at most 32, 16 times the cores of this process, 2"):
        set_threads(5000)
