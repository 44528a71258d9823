"""Sampling against transformers' own processors, and noise that is a function of its key."""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.engine.sampling.filters import candidates
from baton.engine.sampling.noise import GOLDEN, MASK, MIX_1, MIX_2, gumbel, noise_key, uniform
from baton.engine.sampling.penalties import penalize
from baton.engine.sampling.sampler import Sampler, SampleRow, sample_row
from baton.sampling_params import SamplingParams
from tests.support.engine.toy_engine import engine_request

VOCAB = 500


def make_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: torch.Tensor, *rows: SampleRow) -> list[int]:
    return [drawn.token_id for drawn in Sampler().sample(logits, list(rows))]


def row(position: int = 5, choice: int = 0, prompt_ids=(), output_ids=(), bans=frozenset(), **params) -> SampleRow:
    return SampleRow(SamplingParams(**params), choice, position, prompt_ids, output_ids, bans)


# ---- before the temperature ----


def test_repetition_penalty_as_transformers():
    logits = make_logits(1)
    prompt, output = [3, 4, 4, 9], [9, 100]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    penalize(logits[0], SamplingParams(repetition_penalty=1.7), prompt, output, frozenset())
    assert torch.equal(logits, expected)


def test_what_a_prompt_holds_is_found_once():
    """Not again in each step, in which all other requests wait: of a long prompt that took milliseconds."""
    request, other = (
        engine_request("a", [5, 3, 5, 7], **penalty)
        for penalty in ({"repetition_penalty": 1.3}, {"frequency_penalty": 1.0})
    )
    token_ids = list(request.token_ids)
    first = sample_row(request, request.sampling, 0, token_ids)
    second = sample_row(request, request.sampling, 0, [*token_ids, 9], [8])
    assert list(first.prompt_ids) == [3, 5, 7] and second.prompt_ids is first.prompt_ids
    assert (first.output_ids, second.output_ids) == ([], [9, 8])
    third = sample_row(other, other.sampling, 0, [*token_ids, 9])
    assert len(third.prompt_ids) == 0 and third.output_ids == [9], "the prompt is not looked at"


def test_presence_and_frequency_count_the_output_only():
    logits = make_logits(1)[0]
    before = logits.clone()
    penalize(logits, SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [1, 2], [2, 2, 7], frozenset())
    change = before - logits
    assert change[2].item() == pytest.approx(1.0) and change[7].item() == pytest.approx(0.75)
    assert change.count_nonzero() == 2


def test_bias_comes_after_penalties_and_decides_greedy():
    logits = torch.zeros(1, VOCAB)
    logits[0, 10], logits[0, 20] = 2.0, 1.9
    assert sample(logits, row()) == [10]
    assert sample(logits, row(prompt_ids=[10], repetition_penalty=1.2)) == [20]
    assert sample(logits, row(logit_bias=((30, 2.5),))) == [30]
    assert sample(logits, row(prompt_ids=[10], repetition_penalty=1.2, logit_bias=((10, 0.5),))) == [10]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_bans_until_min_tokens(temperature):
    logits = torch.zeros(1, VOCAB)
    logits[0, 10], logits[0, 11], logits[0, 12] = 60.0, 50.0, 40.0
    banned = frozenset({10, 11})
    assert sample(logits, row(temperature=temperature)) == [10]
    assert sample(logits, row(temperature=temperature, bans=banned, logit_bias=((10, 99.0),))) == [12]


def test_logits_are_left_as_they_are():
    logits = make_logits(2)
    before = logits.clone()
    sample(logits, row(logit_bias=((1, 5.0),), temperature=0.7), row(temperature=0.7, top_k=3, output_ids=[1]))
    assert torch.equal(logits, before)


# ---- filters ----


def warped(scores: torch.Tensor, params: SamplingParams) -> set[int]:
    """Token ids that transformers' warpers leave of one row, temperature already applied."""
    scores = scores.unsqueeze(0).clone()
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return set(torch.isfinite(scores[0]).nonzero().view(-1).tolist())


FILTERS = [
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=10_000),
    dict(top_p=0.9),
    dict(top_p=0.01),
    dict(top_p=0.999),
    dict(min_p=0.1),
    dict(min_p=1.0),
    dict(top_k=50, top_p=0.8),
    dict(top_k=50, top_p=0.8, min_p=0.05),
    dict(top_p=0.7, min_p=0.02),
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_filters_as_transformers(params, temperature):
    for seed in range(5):
        scores = TemperatureLogitsWarper(temperature)(None, make_logits(1, seed))[0]
        kept = candidates(scores, SamplingParams(temperature=temperature, **params))
        assert len(kept) == len(set(kept.tolist()))
        assert set(kept.tolist()) == warped(scores, SamplingParams(temperature=temperature, **params))


@pytest.mark.parametrize("params", [dict(top_k=2), dict(top_k=3), dict(top_p=0.5), dict(min_p=1.0)], ids=str)
def test_ties_as_transformers(params):
    """Whole numbers, so that many tokens share a score; equal probabilities, so that top_p is met exactly."""
    for scores in (torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0, 2.0]), torch.zeros(4), torch.zeros(8)):
        assert set(candidates(scores, SamplingParams(**params)).tolist()) == warped(scores, SamplingParams(**params))


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
def test_nucleus_of_a_large_vocabulary(sharpness, top_p):
    """With and without the short cut: a flat distribution does not fit into its head."""
    scores = make_logits(1, vocab_size=5000)[0] * sharpness
    assert set(candidates(scores, SamplingParams(top_p=top_p)).tolist()) == warped(scores, SamplingParams(top_p=top_p))
    scores = scores.round()  # many ties: as many are kept, which of them is open
    kept, expected = candidates(scores, SamplingParams(top_p=top_p)), warped(scores, SamplingParams(top_p=top_p))
    assert torch.equal(scores[kept].sort().values, scores[list(expected)].sort().values)


def test_top_k_one_is_greedy():
    logits = make_logits(20)
    assert sample(logits, *[row(position=i, temperature=1.5, top_k=1) for i in range(20)]) == logits.argmax(1).tolist()


# ---- noise ----


def noise(seed: int, choice: int, position: int, token_id: int) -> float:
    """The noise of one token, in plain Python: what the vectors compute."""
    x = (noise_key(seed, choice, position) + GOLDEN * (token_id + 1)) & MASK
    x = ((x ^ (x >> 30)) * MIX_1) & MASK
    x = ((x ^ (x >> 27)) * MIX_2) & MASK
    return -math.log(-math.log1p(-(((x ^ (x >> 31)) >> 11) + 0.5) * 2.0**-53))


def test_noise_is_a_function_of_its_key():
    token_ids = torch.arange(200)
    for seed, choice, position in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (2**64 - 1, 7, 100_000)):
        vector = gumbel(uniform(noise_key(seed, choice, position), token_ids))
        for token_id in (0, 1, 199):
            assert vector[token_id].item() == pytest.approx(noise(seed, choice, position, token_id), rel=1e-12)
    # The same on every platform and in every version.
    assert noise(0, 0, 1, 5) == pytest.approx(-0.8803499799553977, rel=1e-12)


def test_noise_is_uniform():
    """Chi-square over 64 cells, along token ids, positions and seeds; correlation between neighbours."""
    draws = {
        "token ids": uniform(noise_key(1, 0, 2), torch.arange(64_000)),
        "positions": torch.cat([uniform(noise_key(1, 0, position), torch.tensor([5])) for position in range(16_000)]),
        "seeds": torch.cat([uniform(noise_key(seed, 0, 9), torch.tensor([5])) for seed in range(16_000)]),
    }
    for name, values in draws.items():
        assert values.min() > 0 and values.max() < 1
        expected = len(values) / 64
        chi_square = ((torch.histc(values.float(), 64, 0, 1) - expected) ** 2 / expected).sum().item()
        assert 30 < chi_square < 110, name  # 63 degrees of freedom: both ends below 1 in 10,000
        correlation = torch.corrcoef(torch.stack((values[1:], values[:-1])))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(len(values)), name


@pytest.mark.parametrize("params", [{}, dict(top_k=6), dict(top_p=0.95), dict(min_p=0.01)], ids=str)
def test_draws_follow_the_softmax(params):
    """Chi-square of 6,000 draws at as many positions against the filtered softmax."""
    scores = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -4.0])
    count = 6000
    rows = [row(position=position, temperature=0.8, seed=3, **params) for position in range(count)]
    drawn = torch.tensor(sample(scores.expand(count, -1).clone(), *rows))
    kept = candidates(scores / 0.8, SamplingParams(**params))
    expected = torch.zeros(len(scores))
    expected[kept] = (scores[kept] / 0.8).softmax(0) * count
    observed = torch.bincount(drawn, minlength=len(scores))
    assert observed[expected == 0].sum() == 0
    chi_square = ((observed - expected) ** 2 / expected)[expected > 0].sum().item()
    assert chi_square < 30  # at most 7 degrees of freedom: 1 in 10,000


def test_a_row_does_not_depend_on_its_neighbours():
    logits = make_logits(40)
    rows = []
    for i in range(40):
        params = dict(seed=i % 5, temperature=(0.0, 0.5, 1.0, 1.3)[i % 4], top_k=(0, 0, 5)[i % 3], logprobs=i % 2)
        rows.append(row(position=i, choice=i % 3, **params))
    together = Sampler().sample(logits, rows)
    alone = [Sampler().sample(logits[i : i + 1], [rows[i]])[0] for i in range(40)]
    assert [drawn.token_id for drawn in together] == [drawn.token_id for drawn in alone]
    assert together == alone


def test_choices_seeds_and_positions_differ():
    logits = torch.zeros(1, VOCAB)
    keys = [dict(seed=s, choice=c, position=p) for s in (0, 1) for c in (0, 1) for p in (3, 4)]
    drawn = {sample(logits, row(temperature=1.0, **key))[0] for key in keys}
    assert len(drawn) == len(keys)


# ---- logprobs ----


def test_logprobs_are_of_the_raw_logits():
    logits = make_logits(3)
    table = logits.log_softmax(1)
    rows = [row(logprobs=2, logit_bias=((17, 50.0),)), row(), row(logprobs=0, temperature=0.5)]
    first, second, third = Sampler().sample(logits, rows)
    assert first.token_id == 17 and first.logprobs.chosen == (17, pytest.approx(table[0, 17].item()))
    best = table[0].topk(2)
    assert [token_id for token_id, _ in first.logprobs.top] == best.indices.tolist()
    assert [value for _, value in first.logprobs.top] == pytest.approx(best.values.tolist())
    assert second.logprobs is None
    assert third.logprobs.top == () and third.logprobs.chosen[0] == third.token_id


def test_a_sampler_takes_no_rows():
    assert Sampler().sample(torch.empty(0, VOCAB), []) == []
