"""Mixers of every recurrent layer with random parameters, and sequences of random rows that walk through them."""

import torch

from baton.engine import native
from baton.engine.core.batch import ForwardBatch, SeqSlice, StateRows
from baton.engine.core.state_spec import DeltaNetSpec, Mamba2Spec, MambaSpec, StateSpec
from baton.engine.kv.pool import CPU
from baton.engine.kv.states import StatePool
from baton.engine.layers.linear import choose
from baton.engine.parallel.state_part import StatePart
from baton.engine.recurrent.delta_net import DeltaNetMixer, DeltaNetParameters
from baton.engine.recurrent.mamba import MambaMixer, MambaParameters
from baton.engine.recurrent.mamba2 import Mamba2Mixer, Mamba2Parameters
from baton.engine.recurrent.mixer import Mixer
from baton.engine.weights.forms import DenseWeight
from kvtransfer.layout import STATE, KVGroup

NUM_LAYERS, NUM_STATES = 2, 4
MIXER_SPECS = {
    "plain": Mamba2Spec(num_heads=4, head_dim=16, num_groups=1, state_size=16, taps=4),
    "groups": Mamba2Spec(
        num_heads=4,
        head_dim=16,
        num_groups=2,
        state_size=48,
        taps=3,
        conv_bias=False,
        norm_groups=2,
        step_limit=(0.1, 0.9),
    ),
    "norm-first": Mamba2Spec(num_heads=2, head_dim=16, num_groups=1, state_size=176, taps=4, norm_first=True),
    "no-norm": Mamba2Spec(num_heads=2, head_dim=32, num_groups=1, state_size=32, taps=2, norm_groups=0),
    "delta-net": DeltaNetSpec(num_heads=4, num_key_heads=2, key_dim=48, value_dim=32, taps=4),
    "delta-net-narrow": DeltaNetSpec(num_heads=2, num_key_heads=2, key_dim=16, value_dim=16, taps=3),
    "mamba": MambaSpec(num_channels=48, state_size=16, step_rank=8, taps=4),
}


def make_mixer(spec: StateSpec, dtype: torch.dtype) -> Mixer:
    """Return a mixer of random parameters, whose rows are projected already."""
    torch.manual_seed(0)
    if isinstance(spec, MambaSpec):
        make, _ = choose("auto", True, dtype, torch.device("cpu"))
        selection, steps = (
            make(DenseWeight(torch.randn(size).to(dtype) / size[1] ** 0.5), None, 1, False)
            for size in ((sum(spec.selected_sizes), spec.inner_size), (spec.inner_size, spec.step_rank))
        )
        norms = tuple(torch.rand(size) for size in spec.selected_sizes)
        own = MambaParameters(
            torch.randn(spec.taps, spec.inner_size), torch.randn(spec.inner_size), selection, norms, steps,
            -torch.rand(spec.recurrence_shape), torch.randn(spec.inner_size),
        )  # fmt: skip
        return MambaMixer(StatePart(spec), own, lambda x: x, lambda x: x, dtype)
    if isinstance(spec, DeltaNetSpec):
        decay, norm_weight = -torch.rand(spec.num_heads), torch.rand(spec.value_dim)
        own = DeltaNetParameters(
            torch.randn(spec.taps, spec.conv_size), torch.randn(spec.num_heads), decay, norm_weight
        )
        return DeltaNetMixer(StatePart(spec), own, lambda x: x, lambda x: x, dtype, None)
    parameters = Mamba2Parameters(
        conv_weight=torch.randn(spec.taps, spec.conv_size),
        conv_bias=torch.randn(spec.conv_size) if spec.conv_bias else None,
        step_bias=torch.randn(spec.num_heads),
        decay=-torch.rand(spec.num_heads),
        skip=torch.randn(spec.num_heads),
        norm_weight=torch.rand(spec.inner_size) if spec.norm_groups else None,
    )
    return Mamba2Mixer(StatePart(spec), parameters, lambda x: x, lambda x: x, dtype, None)


def without_kernels(monkeypatch) -> None:
    """Let mixers that are made from here on compute with torch."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "unavailable", lambda: "switched off here")


class MixerSteps:
    """Sequences of random rows in one pool, each with its own block, whose memory held something else before."""

    def __init__(
        self, mixer: Mixer, lengths: list[int], dtype: torch.dtype = torch.float32, device: torch.device = CPU
    ):
        self.mixer, size = mixer, -(-mixer.spec.num_elements // 64)
        group = KVGroup(STATE, NUM_LAYERS, size, 64, "fp32", 1)
        self.states = StatePool(
            group, torch.full((NUM_STATES * group.block_bytes,), 255, dtype=torch.uint8, device=device)
        )
        torch.manual_seed(1)
        self.rows = [torch.randn(length, mixer.spec.projected_size).to(device, dtype) for length in lengths]
        self.done, self.pending = [0] * len(lengths), [0] * len(lengths)
        self.out = [torch.zeros(length, mixer.spec.inner_size, dtype=dtype, device=device) for length in lengths]

    def step(self, counts: list[int], drafts: list[int] | None = None, accepted: list[int] | None = None) -> None:
        """Take `counts` rows of each sequence, and `drafts` proposals behind them, of which `accepted` are the
        sequence's own next rows and the others are not."""
        drafts, accepted = drafts or [0] * len(counts), accepted or [0] * len(counts)
        if not any(counts):
            return
        batch, x = self._batch(counts, drafts, accepted)
        y = self.mixer(x, self.mixer.plan(batch, self.states), 1)
        for seq in batch.seqs:
            index = seq.state.state_id
            kept = counts[index] + accepted[index]
            self.out[index][self.done[index] : self.done[index] + kept] = y[seq.query_start : seq.query_start + kept]
            self.done[index] += kept
            self.pending[index] = accepted[index]

    def batch_of(self, counts: list[int]) -> ForwardBatch:
        """Return the step that would take `counts` rows of each sequence."""
        return self._batch(counts, [0] * len(counts), [0] * len(counts))[0]

    def _batch(self, counts, drafts, accepted) -> tuple[ForwardBatch, torch.Tensor]:
        seqs, parts, start = [], [], 0
        for index, (count, extra) in enumerate(zip(counts, drafts, strict=True)):
            if not count:
                continue
            begin, end = self.done[index], self.done[index] + count
            wrong = torch.ones(extra - accepted[index], self.mixer.spec.projected_size)
            parts += [self.rows[index][begin : end + accepted[index]], wrong.to(self.rows[index])]
            state = StateRows(index, self.pending[index], extra)
            seqs.append(SeqSlice(start, count + extra, end + extra, torch.empty(0), state))
            start += count + extra
        x, empty = torch.cat(parts), torch.empty(0, dtype=torch.int64)
        batch = ForwardBatch(torch.zeros(len(x)), empty, empty, seqs, empty)
        return batch, x


def each_alone(
    mixer: Mixer, lengths: list[int], dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> list[torch.Tensor]:  # fmt: skip
    """Return what the mixer makes of every sequence, alone and in one step."""
    found = []
    for index, length in enumerate(lengths):
        steps = MixerSteps(mixer, lengths, dtype, device)
        steps.step([length if other == index else 0 for other in range(len(lengths))])
        found.append(steps.out[index])
    return found
