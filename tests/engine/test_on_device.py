"""The sampler of GPUs draws what the other draws."""

import pytest
import torch

from baton.engine.request import SamplingParams
from baton.engine.sampling.on_device import DeviceSampler, draw
from baton.engine.sampling.sampler import Sampler, SampleRow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIXED = (
    dict(temperature=0.0), dict(temperature=1.0, seed=5), dict(temperature=0.3, seed=6), dict(temperature=3.0, seed=7),
)  # fmt: skip


def make_rows(*params: dict) -> list[SampleRow]:
    return [SampleRow(SamplingParams(**each), index % 3, 10 + index) for index, each in enumerate(params)]


@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0], ids=["flat", "nearly flat", "wide"])
@pytest.mark.parametrize("vocab_size", [7, 500, 40_000])
def test_as_the_other(vocab_size, scale):
    generator = torch.Generator().manual_seed(vocab_size)
    for turn in range(4):
        rows = make_rows(*MIXED, *(dict(temperature=0.7, seed=100 * turn + seed) for seed in range(12)))
        logits = torch.randn(len(rows), vocab_size, generator=generator) * scale
        wanted = Sampler().sample(logits, rows)
        assert DeviceSampler().sample(logits.to(DEVICE), rows) == wanted


def test_a_row_is_alone():
    rows, logits = make_rows(*MIXED), torch.randn(4, 300)
    together = draw(logits.to(DEVICE), rows).tolist()
    assert together == [int(draw(logits[i : i + 1].to(DEVICE), rows[i : i + 1])) for i in range(4)]


def test_rows_that_ask_for_more_take_the_other_path():
    rows = make_rows(dict(temperature=1.0, top_p=0.9, seed=1), dict(temperature=0.0, logprobs=2), dict(temperature=0.0))
    logits = torch.randn(3, 60)
    with torch.device(DEVICE):
        found = DeviceSampler().sample(logits.to(DEVICE), rows)
    wanted = Sampler().sample(logits, rows)
    assert [each.token_id for each in found] == [each.token_id for each in wanted] and found[1].logprobs is not None
