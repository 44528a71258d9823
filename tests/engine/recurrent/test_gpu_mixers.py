"""Layers with a state by Triton's kernels, compiled on a GPU and in the interpreter on a CPU: against torch's fold in
float64, and bit for bit whatever shares a step, wherever chunks begin, and what was proposed and taken back."""

import os
import random
from dataclasses import fields, replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels
from baton.engine.core.batch import SeqTable, state_fields
from baton.engine.core.state_spec import DeltaNetSpec, MambaSpec
from tests.support.engine.mixers import MIXER_SPECS, MixerSteps, each_alone, make_mixer, without_kernels

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = pytest.mark.skipif(
    bool(kernels.unavailable(DEVICE.type)), reason=kernels.unavailable(DEVICE.type) or "there"
)

# Smaller than those of the native kernels: the interpreter takes a while for each token and head. Sizes that no tile
# divides are among them.
SPECS = {
    "mamba2": replace(MIXER_SPECS["plain"], num_heads=2, head_dim=8),
    "groups": replace(MIXER_SPECS["groups"], num_heads=2, head_dim=12, state_size=24),
    "norm-first": replace(MIXER_SPECS["norm-first"], head_dim=8, state_size=16),
    "no-norm": replace(MIXER_SPECS["no-norm"], head_dim=8, num_groups=2, state_size=16),
    "delta-net": replace(MIXER_SPECS["delta-net"], num_heads=2, num_key_heads=1, key_dim=12, value_dim=8),
    "mamba": replace(MIXER_SPECS["mamba"], state_size=6),
}


def some(often: tuple[str, ...], others: tuple[str, ...]) -> list:
    """Names of SPECS, some of them left to the long tests."""
    return [*often, *(pytest.param(name, marks=pytest.mark.long) for name in others)]


def placed(parameters):
    moved = {field.name: getattr(parameters, field.name) for field in fields(parameters)}
    for name, value in moved.items():
        if isinstance(value, torch.Tensor):
            moved[name] = value.to(DEVICE)
        elif isinstance(value, tuple):
            moved[name] = tuple(each.to(DEVICE) for each in value)
        elif value is not None and DEVICE.type == "cuda":  # a product of Mamba's rows, on the CPU in either form
            moved[name] = lambda x, apply=value: apply(x.cpu()).to(DEVICE)
    return replace(parameters, **moved)


def alone(mixer, lengths, dtype=torch.float32):
    return each_alone(mixer, lengths, dtype, DEVICE)


def on_gpu(spec, dtype=torch.float32, exact=True):
    """The same layer, of the same parameters."""
    from baton.engine.recurrent.gpu import GpuDeltaNet, GpuMamba, GpuMamba2

    parameters = placed(make_mixer(spec, dtype)._parameters)
    as_is = (lambda x: x, lambda x: x)
    if isinstance(spec, MambaSpec):
        return GpuMamba(spec, parameters, *as_is, dtype)
    return (GpuDeltaNet if isinstance(spec, DeltaNetSpec) else GpuMamba2)(spec, parameters, *as_is, exact)


class GpuSteps(MixerSteps):
    """The same in a pool that has room for proposals, if any are made."""

    def __init__(self, mixer, lengths, dtype=torch.float32, proposes: bool = False):
        super().__init__(mixer, lengths, dtype, DEVICE)
        if proposes:
            self.states.hold_drafts(mixer.spec.conv_size + mixer.spec.num_scalars).fill_(float("nan"))


@pytest.mark.parametrize("name", SPECS)
def test_near_torch(name, monkeypatch):
    """Of inputs that float64 says the same of, up to fp32's rounding."""
    ours = [part.cpu() for part in alone(on_gpu(SPECS[name]), [11])]
    without_kernels(monkeypatch)
    torch.testing.assert_close(ours, each_alone(make_mixer(SPECS[name], torch.float32), [11]), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("name", some(("mamba2", "delta-net"), ("groups", "norm-first", "no-norm", "mamba")))
def test_chunks_company_and_proposals_change_no_bit(name):
    """Prompts and decode in one step; accepted proposals are folded in by the next step, others never."""
    mixer, lengths, chance = on_gpu(SPECS[name]), [11, 8, 2], random.Random(0)
    expected, steps = alone(mixer, lengths), GpuSteps(mixer, lengths, proposes=True)
    steps.step([5, 1, 0])
    while any(done < length for done, length in zip(steps.done, lengths, strict=True)):
        left = [length - done for done, length in zip(steps.done, lengths, strict=True)]
        counts = [min(chance.choice((0, 1, 1, 3)), each) for each in left]
        drafts = [chance.randint(0, 3) if count == 1 else 0 for count in counts]
        accepted = [min(chance.randint(0, each), other - 1) if each else 0 for each, other in zip(drafts, left)]
        steps.step(counts, drafts, accepted)
    assert all(map(torch.equal, steps.out, expected))


@pytest.mark.parametrize("name", some(("mamba2", "delta-net"), ("groups",)))
def test_prompts_by_chunks(name, monkeypatch):
    """As products of matrices, near the fold; a token's bits alone, in company, and with its prompt cut at multiples of
    a chunk. What follows the last whole chunk is folded."""
    from baton.engine.recurrent import gpu

    monkeypatch.setattr(gpu, "CHUNK", 16)
    lengths, mixer = [35, 17], on_gpu(SPECS[name], exact=False)
    expected, steps = alone(mixer, lengths), GpuSteps(mixer, lengths)
    for counts in ([16, 1], [16, 1], [2, 15], [1, 0]):  # the other's rows are never whole chunks from a multiple on
        steps.step(counts)
    assert torch.equal(steps.out[0], expected[0]) and not torch.equal(steps.out[1], expected[1])
    folded = alone(on_gpu(SPECS[name]), lengths)
    assert torch.equal(folded[1], steps.out[1])
    torch.testing.assert_close(expected, folded, atol=3e-5, rtol=3e-5)
    without_kernels(monkeypatch)
    near = each_alone(make_mixer(SPECS[name], torch.float32), lengths)
    torch.testing.assert_close([part.cpu() for part in expected], near, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("name", some(("groups",), ("delta-net", "mamba")))
def test_rows_of_two_bytes(name):
    mixer = on_gpu(SPECS[name], torch.bfloat16)
    expected, steps = alone(mixer, [10], torch.bfloat16), GpuSteps(mixer, [10], torch.bfloat16)
    steps.step([7])
    steps.step([3])
    assert torch.equal(steps.out[0], expected[0]) and expected[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", some(("mamba2",), ("delta-net", "mamba")))
def test_padding_has_the_rows_that_it_repeats_and_folds_nothing(name):
    mixer = on_gpu(SPECS[name])
    plain, padded = (GpuSteps(mixer, [4, 3]) for _ in range(2))
    for steps in (plain, padded):
        steps.step([3, 2])
    plain.step([1, 1])
    batch = padded.batch_of([1, 1])
    table = SeqTable.of(batch.seqs, DEVICE)
    starts = torch.arange(5, dtype=torch.int32, device=DEVICE)
    fields = state_fields(batch.seqs, repeated=1, num_repeats=2).to(DEVICE)
    table = replace(
        table, query_starts=starts, kv_lens=torch.tensor([4, 3, 3, 3], dtype=torch.int32).to(DEVICE), states=fields
    )
    rows = torch.stack([padded.rows[0][3], *[padded.rows[1][2]] * 3])
    batch = replace(batch, token_ids=torch.zeros(4), table=table)
    y = mixer(rows, mixer.plan(batch, padded.states), 1)
    assert torch.equal(y[0], plain.out[0][3]) and all(torch.equal(row, plain.out[1][2]) for row in y[1:])
    kept = [steps.states.blocks[:, 1, : mixer.spec.num_elements] for steps in (plain, padded)]
    assert torch.equal(kept[0].view(torch.int32), kept[1].view(torch.int32))
