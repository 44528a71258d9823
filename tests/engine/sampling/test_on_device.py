"""The sampler of GPUs draws what the other draws."""

import pytest
import torch

from baton.engine.sampling.filters import candidates, survivors
from baton.engine.sampling.on_device import DeviceSampler, draw, plain_row
from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.sampling_params import SamplingParams
from tests.support.engine.toys import make_request

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIXED = (
    dict(temperature=0.0), dict(temperature=1.0, seed=5), dict(temperature=0.3, seed=6), dict(temperature=3.0, seed=7),
)  # fmt: skip
FILTERS = (
    dict(top_k=1), dict(top_k=5), dict(top_k=100_000), dict(top_p=0.5), dict(top_p=0.999), dict(min_p=0.2),
    dict(top_k=40, top_p=0.9), dict(top_k=12, top_p=0.7, min_p=0.05), dict(top_p=1e-9), dict(min_p=1.0),
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


@pytest.mark.parametrize("vocab_size", [7, 500, 40_000])
def test_filters_leave_the_tokens_of_the_other(vocab_size):
    """Equal scores at the cut too: of those the higher ids stay."""
    rows = make_rows(*(dict(temperature=1.0, seed=seed, **each) for seed, each in enumerate(FILTERS)))
    for scores in (torch.randn(len(rows), vocab_size), torch.randn(len(rows), vocab_size).round()):
        found = survivors(scores.to(DEVICE), [row.params for row in rows]).cpu()
        for row, left, values in zip(rows, found, scores, strict=True):
            kept = left.isfinite().nonzero().view(-1)
            assert kept.tolist() == sorted(candidates(values, row.params).tolist()), row.params
            assert torch.equal(left[kept], values[kept])
        wanted = [each.token_id for each in Sampler().sample(scores, rows)]
        assert draw(scores.to(DEVICE), rows).tolist() == wanted


def test_biases_and_bans():
    bias = ((3, 50.0), (9, -4.0), (11, 2.5))
    rows = [
        SampleRow(SamplingParams(temperature=temperature, seed=4, logit_bias=bias), 0, 10, (), (), banned)
        for temperature in (0.0, 1.0)
        for banned in (frozenset(), frozenset((3,)), frozenset((3, 11, 20)))
    ]
    logits = torch.randn(len(rows), 40)
    kept = logits.clone()
    found = draw(logits.to(DEVICE), rows).tolist()
    assert found == [each.token_id for each in Sampler().sample(logits, rows)] and torch.equal(logits, kept)
    assert found[0] == 3 and 3 not in found[1:3]


def test_a_row_is_alone():
    rows, logits = make_rows(*MIXED, *(dict(temperature=0.8, seed=3, **each) for each in FILTERS)), torch.randn(14, 300)
    together = draw(logits.to(DEVICE), rows).tolist()
    assert together == [int(draw(logits[i : i + 1].to(DEVICE), rows[i : i + 1])) for i in range(14)]


def test_what_hangs_on_the_tokens_before_is_not_drawn_ahead():
    def row(**options):
        return plain_row(make_request("a", range(10), **options), 0, 12)

    assert row().position == 12 and row(temperature=1.0, top_p=0.5, logit_bias=((1, 1.0),)) is not None
    for options in (
        dict(logprobs=0),
        dict(presence_penalty=0.1),
        dict(frequency_penalty=1),
        dict(repetition_penalty=2),
    ):
        assert row(**options) is None
    stops = frozenset((4, 5))
    assert row(stop_token_ids=stops, min_tokens=3).min_tokens_left_bans == stops
    assert not row(stop_token_ids=stops, min_tokens=2).min_tokens_left_bans


def test_rows_that_ask_for_more_take_the_other_path():
    rows = make_rows(dict(temperature=1.0, top_p=0.9, seed=1), dict(temperature=0.0, logprobs=2), dict(temperature=0.0))
    logits = torch.randn(3, 60)
    with torch.device(DEVICE):
        found = DeviceSampler().sample(logits.to(DEVICE), rows)
    wanted = Sampler().sample(logits, rows)
    assert [each.token_id for each in found] == [each.token_id for each in wanted] and found[1].logprobs is not None
