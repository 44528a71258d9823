"""Mamba as Jamba has it, between its products before and behind: convolution, products of its rows, recurrence, gates.

state = state * exp(dt A) + (dt x) B       y = state C + D x       [inner, state_size], fp32
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.core.state_spec import MambaSpec
from baton.engine.layers.linear import LinearKernel
from baton.engine.recurrent.mixer import Mixer, convolved


@dataclass(frozen=True, slots=True)
class MambaParameters:
    """Of one layer, fp32 but for the kernels."""

    conv_weight: Tensor  # [taps, channels], the oldest tap first
    conv_bias: Tensor | None  # [channels]
    selection: LinearKernel  # a row to what steps are made of, what is written, what is read
    norms: tuple[Tensor, ...]  # weights of each of the three
    steps: LinearKernel  # to a step for each element
    decay: Tensor  # [inner, state_size], below 0
    skip: Tensor  # [inner]


class MambaMixer(Mixer):
    """One layer of Mamba."""

    def __init__(
        self, spec: MambaSpec, parameters: MambaParameters, projection: LinearKernel, output: LinearKernel,
        dtype: torch.dtype,
    ):  # fmt: skip
        self.spec, self._parameters, self._dtype = spec, parameters, dtype
        super().__init__(projection, output, None, "")

    def _rows(self, inputs: Tensor, scalars: Tensor) -> Iterable[tuple[Tensor, ...]]:
        spec, own = self.spec, self._parameters
        # Row by row but for the products, whose rows do not depend on each other: bits do not depend on their number.
        rows = [convolved(tokens, own.conv_weight, own.conv_bias) for tokens, _ in super()._rows(inputs, scalars)]
        selected = own.selection(torch.stack(rows).to(self._dtype)).float()
        normed = [
            [
                F.rms_norm(part, part.shape, weight, spec.eps)
                for part, weight in zip(row.split(spec.selected_sizes), own.norms, strict=True)
            ]
            for row in selected
        ]
        steps = own.steps(torch.stack([made[0] for made in normed]).to(self._dtype)).float()
        return ((x, step, made[1], made[2]) for x, step, made in zip(rows, steps, normed, strict=True))

    def _token(self, state: Tensor, *row: Tensor) -> tuple[Tensor, Tensor]:
        x, raw_step, write, read = row
        own, step = self._parameters, F.softplus(raw_step)
        state = state * (step.unsqueeze(1) * own.decay).exp() + (step * x).unsqueeze(1) * write
        return state, (state * read).sum(1) + own.skip * x

    def _finish(self, y: Tensor, gates: Tensor) -> Tensor:
        return y * F.silu(gates)
