"""The int4 KV of bench/quality.py is the form that its name says."""

import torch

from baton.engine.kv.pool import KVPool
from bench import quality
from kvtransfer.layout import KVGroup, KVLayout

TOKENS, HEADS, SIZE = 75, 2, 16  # two whole groups of 32 tokens and a part of one


def kept(pool_type: type[KVPool], k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v [T, heads, size] written and read back."""
    pool = pool_type(KVLayout((KVGroup("paged", 1, HEADS, SIZE, "fp32", 32),)), 3)
    pool.write(0, torch.arange(len(k)), k, v)
    return tuple(x.transpose(0, 1) for x in pool.gather(0, torch.arange(3), len(k)))


def assert_rounded(found: torch.Tensor, given: torch.Tensor) -> None:
    """Rows of at most 16 levels, none further from what it was than half a step (and what fp16 scales cost)."""
    assert all(len(row.unique()) <= 16 for row in found.flatten(0, -2))
    step = (given.amax(-1) - given.amin(-1)) / 15
    assert ((found - given).abs().amax(-1) <= 0.51 * step + 0.01).all()


def test_keys_per_channel_and_values_per_token():
    torch.manual_seed(0)
    k = torch.randn(TOKENS, HEADS, SIZE) * torch.logspace(-1, 1, SIZE)  # channels of unequal size
    v = torch.randn(TOKENS, HEADS, SIZE)
    keys, values = kept(quality.PerChannel, k, v)
    for begin in range(0, TOKENS, 32):
        assert_rounded(keys[begin : begin + 32].movedim(0, -1), k[begin : begin + 32].movedim(0, -1))
    assert_rounded(values, v)
    by_token, same = kept(quality.PerToken, k, v)
    assert_rounded(by_token, k)
    assert torch.equal(same, values)
    assert (keys - k).square().mean() < (by_token - k).square().mean()
