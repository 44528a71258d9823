"""Layers with a state: the native kernel against torch, and neither sees where chunks begin, what shares a step, or
what was proposed and taken back."""

import random

import pytest
import torch

from baton.engine import native
from baton.engine.core.state_spec import StateSpec
from tests.support.engine.mixers import MIXER_SPECS, MixerSteps, each_alone, make_mixer, without_kernels


@pytest.fixture(params=MIXER_SPECS)
def spec(request) -> StateSpec:
    return MIXER_SPECS[request.param]


@pytest.fixture(params=["native", "torch"])
def mixer(request, spec, monkeypatch):
    if request.param == "torch":
        without_kernels(monkeypatch)
    elif native.library() is None:
        pytest.skip(native.unavailable())
    made = make_mixer(spec, torch.float32)
    assert made.name == request.param
    return made


def test_native_is_near_torch(spec, monkeypatch):
    if native.library() is None:
        pytest.skip(native.unavailable())
    ours = each_alone(make_mixer(spec, torch.float32), [70])
    without_kernels(monkeypatch)
    torch.testing.assert_close(ours, each_alone(make_mixer(spec, torch.float32), [70]), atol=1e-4, rtol=1e-4)


def test_chunks_and_company_change_no_bit(mixer):
    lengths, chance = [75, 40, 3], random.Random(0)
    expected, steps = each_alone(mixer, lengths), MixerSteps(mixer, lengths)
    while any(done < length for done, length in zip(steps.done, lengths, strict=True)):
        steps.step([min(chance.choice((0, 1, 7, 33)), length - done) for done, length in zip(steps.done, lengths)])
    assert all(map(torch.equal, steps.out, expected))


def test_proposals_change_no_bit(mixer):
    """Accepted ones are folded in by the next step, others never."""
    lengths, chance = [60, 50], random.Random(1)
    expected, steps = each_alone(mixer, lengths), MixerSteps(mixer, lengths)
    steps.step([20, 1])
    while any(done < length for done, length in zip(steps.done, lengths, strict=True)):
        left = [length - done for done, length in zip(steps.done, lengths, strict=True)]
        counts = [min(1, each) for each in left]
        drafts = [chance.randint(0, 4) * count for count in counts]
        accepted = [min(chance.randint(0, each), other - 1) if each else 0 for each, other in zip(drafts, left)]
        steps.step(counts, drafts, accepted)
    assert all(map(torch.equal, steps.out, expected))


@pytest.mark.parametrize("name", ["groups", "delta-net", "mamba"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_two_bytes(dtype, name):
    if native.library() is None:
        pytest.skip(native.unavailable())
    mixer = make_mixer(MIXER_SPECS[name], dtype)
    expected, steps = each_alone(mixer, [50], dtype), MixerSteps(mixer, [50], dtype)
    steps.step([17])
    steps.step([33])
    assert torch.equal(steps.out[0], expected[0]) and expected[0].dtype == dtype
