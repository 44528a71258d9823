"""Masks on logits: the C++ call, tensors, and both samplers do the same."""

from dataclasses import replace

import pytest
import torch

from baton.constraints.constraint import Constraint
from baton.engine.sampling import masking
from baton.engine.sampling.masking import apply_masks
from baton.engine.sampling.on_device import DeviceSampler, plain_row
from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.sampling_params import SamplingParams
from tests.support.engine.toy_engine import engine_request

NEVER = float("-inf")


def masks_of(num_rows: int, vocab_size: int, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return masks [words] and the same as booleans [R, vocab_size]; a row has whole words of both kinds."""
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.rand(num_rows, -(-vocab_size // 32) * 32, generator=generator) < 0.3
    allowed[:, :32], allowed[:, 32:64] = False, True
    weights = (1 << torch.arange(32, dtype=torch.int64)).expand(num_rows, allowed.shape[1] // 32, 32)
    words = (allowed.view(num_rows, -1, 32) * weights).sum(dim=2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return list(words), allowed[:, :vocab_size]


@pytest.mark.parametrize("vocab_size", [64, 100, 4096])
@pytest.mark.parametrize("is_native", [True, False])
def test_what_is_not_in_the_mask_goes(vocab_size, is_native, monkeypatch):
    if not is_native:
        monkeypatch.setattr(masking, "_native", lambda: None)
    logits = torch.randn(5, vocab_size)
    masks, allowed = masks_of(3, vocab_size)
    expected = logits.clone()
    expected[[0, 2, 4]] = expected[[0, 2, 4]].masked_fill(~allowed, NEVER)
    apply_masks(logits, [0, 2, 4], masks)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    "params",
    [
        dict(),
        dict(temperature=0.8),
        dict(temperature=1.0, top_k=3),
        dict(temperature=1.0, top_k=2000, min_p=0.01),
        dict(temperature=1.2, top_p=0.8),
        dict(temperature=0.7, repetition_penalty=1.3),
        dict(logprobs=2),
    ],
)
def test_both_samplers_draw_the_same_among_what_is_allowed(params):
    logits = torch.randn(8, 2048, generator=torch.Generator().manual_seed(1)) * 3
    masks, allowed = masks_of(8, 2048)
    before = logits.clone()
    rows = [
        SampleRow(SamplingParams(seed=index, **params), 0, 9, (1, 2), (3,), mask=masks[index]) for index in range(8)
    ]
    drawn = Sampler().sample(logits, rows)
    assert all(allowed[index, sampled.token_id] for index, sampled in enumerate(drawn))
    assert [each.token_id for each in DeviceSampler().sample(logits, rows)] == [each.token_id for each in drawn]
    assert torch.equal(logits, before)
    for index, row in enumerate(rows):  # whatever shares the batch
        assert Sampler().sample(logits[index : index + 1], [row])[0].token_id == drawn[index].token_id


def test_one_token_that_is_allowed_is_drawn():
    logits, mask = torch.zeros(1, 2048), torch.zeros(64, dtype=torch.int32)
    mask[40] = 1 << 7
    for params in (dict(), dict(temperature=1.0), dict(temperature=1.0, top_p=0.1), dict(temperature=2.0, top_k=5)):
        row = SampleRow(SamplingParams(**params), 0, 5, mask=mask)
        assert Sampler().sample(logits, [row])[0].token_id == DeviceSampler().sample(logits, [row])[0].token_id == 1287


def test_a_constrained_token_is_not_drawn_ahead():
    """Its mask depends on the token before, which a launch behind another does not know."""
    request = engine_request("a", [1, 2, 3])
    assert plain_row(request, 0, 3) is not None
    assert plain_row(replace(request, constraint=Constraint("json_object", "")), 0, 3) is None
