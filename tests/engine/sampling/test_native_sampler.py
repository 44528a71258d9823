"""The sampler of C++ draws what that of torch draws."""

import pytest
import torch
from hypothesis import given, settings

from baton.engine import native
from baton.engine.sampling.native_sampler import NativeSampler, host_sampler
from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.sampling_params import SamplingParams
from tests.engine.sampling.sample_rows import FILTERS, MIXED, SHAPES, any_row, every_row, make_rows

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())


def drawn(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [each.token_id for each in host_sampler().sample(logits, rows)]


def wanted(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [each.token_id for each in Sampler().sample(logits, rows)]


@pytest.mark.parametrize("vocab_size", [7, 16, 500, 5000])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_native_sampler_draws_what_torch_draws(vocab_size, shape):
    """Equal scores at a cut too: of those the higher ids stay."""
    rows = every_row()
    logits = SHAPES[shape](torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(vocab_size)))
    assert drawn(logits, rows) == wanted(logits, rows)


@settings(max_examples=200)
@given(any_row())
def test_the_native_sampler_draws_what_torch_draws_of_any_row(given):
    """Penalties, biases, bans and masks before temperature and filters, among scores that are often equal."""
    logits, row = given
    kept = logits.clone()
    assert drawn(logits, [row]) == wanted(logits, [row]) and torch.equal(logits, kept)


def test_noise_is_that_of_torch():
    """Flat scores leave the choice to it alone: small and large uniforms, high ids, any seed and position."""
    rows = [
        SampleRow(SamplingParams(temperature=1.0, seed=seed * 0x1234567890ABCDE), seed % 4, 10 * seed)
        for seed in range(64)
    ]
    logits = torch.zeros(len(rows), 40_000)
    assert drawn(logits, rows) == wanted(logits, rows)


def test_a_nucleus_of_many_is_that_of_torch():
    """Those that a nearly flat vocabulary leaves, also with equal scores where it is cut."""
    logits = torch.randn(1, 60_000, generator=torch.Generator().manual_seed(3))
    for scores in (logits, (4 * logits).round() / 4):
        for seed, filters in enumerate(
            (dict(top_p=0.95), dict(top_p=0.5), dict(min_p=0.02), dict(top_p=0.9, min_p=0.1))
        ):
            rows = [SampleRow(SamplingParams(temperature=1.5, seed=seed, **filters), 0, at) for at in range(3)]
            assert drawn(scores.expand(3, -1), rows) == wanted(scores.expand(3, -1), rows)


@pytest.mark.parametrize("token_id", [-1, 100, 5_000_000])
def test_a_ban_of_a_token_that_the_logits_lack_bans_nothing(token_id):
    """It wrote outside of them."""
    logits = torch.randn(1, 100)
    bans = SampleRow(SamplingParams(seed=1), 0, 5, min_tokens_left_bans=frozenset([token_id]))
    assert drawn(logits, [bans]) == drawn(logits, [SampleRow(SamplingParams(seed=1), 0, 5)])


def test_a_row_is_drawn_alike_beside_others():
    rows = make_rows(*MIXED, *(dict(temperature=0.8, seed=3, **each) for each in FILTERS[5:8]))
    logits = torch.randn(len(rows), 300)
    together = drawn(logits, rows)
    assert together == [drawn(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]


def test_many_rows_on_several_threads():
    rows = [SampleRow(SamplingParams(temperature=0.9, top_p=0.9, seed=seed), 0, 5) for seed in range(20)]
    logits = torch.randn(len(rows), 5000)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = drawn(logits, rows)
    finally:
        torch.set_num_threads(num_threads)
    assert together == wanted(logits, rows)


def test_log_probabilities_are_those_of_the_other():
    rows = make_rows(dict(temperature=1.0, top_p=0.9, seed=1), dict(temperature=0.0, logprobs=2), dict(temperature=0.0))
    logits = torch.randn(3, 60)
    assert host_sampler().sample(logits, rows) == Sampler().sample(logits, rows)


@pytest.mark.parametrize("mask", [None, torch.zeros(2, dtype=torch.int32)])
def test_rows_without_numbers_or_tokens_draw_one_that_there_is(mask):
    """What a broken model says must end no process."""
    rows = [SampleRow(each.params, 0, 9, mask=mask) for each in every_row()]
    for value in (float("nan"), float("-inf"), float("inf"), 0.0):
        logits = torch.randn(len(rows), 40)
        logits[:, ::2] = value
        assert all(0 <= token_id < 40 for token_id in drawn(logits, rows))


def test_a_row_with_a_nan_fails_no_other_in_torch():
    """One failed the step of all."""
    logits = torch.zeros(2, 40)
    logits[0, 7] = float("nan")
    rows = make_rows(dict(temperature=1.0, seed=1), dict(temperature=1.0, seed=2))
    assert wanted(logits, rows)[1] == wanted(logits[1:], rows[1:])[0]


def test_a_host_with_kernels_has_the_native_sampler():
    assert isinstance(host_sampler(), NativeSampler) and host_sampler().sample(torch.empty(0, 9), []) == []
