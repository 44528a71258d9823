"""Mamba-2 between its two products: convolution, recurrence, gates, norm. In C++ (native/layers/mamba2.cpp), or here in
torch.

    state = state * exp(dt A) + (dt x) B       y = state C + D x       [head_dim, state_size] of each head, fp32
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.native import KINDS
from baton.engine.core.state_spec import Mamba2Spec
from baton.engine.layers.linear import LinearKernel
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.state_part import StatePart
from baton.engine.recurrent.mixer import Mixer, convolved
from baton.engine.recurrent.native import (
    DOUBLE,
    INT,
    POINTER,
    VECTOR,
    Convolution,
    Meeting,
    address,
    convolution,
    meeting,
    unfit_sizes,
)
from baton.engine.weights.leaves import MAX_LEAVES


class _Mamba2(ctypes.Structure):
    """Mirror `Mamba2` of native/layers/mamba2.cpp."""

    _fields_ = [
        ("conv", Convolution),
        *((name, INT) for name in ("num_heads", "head_dim", "num_groups", "state_size")),
        *((name, POINTER) for name in ("step_bias", "decay", "skip", "norm_weight")),
        *((name, INT) for name in ("num_norm_groups", "norm_first", "norm_size", "num_leaves")),
        ("meeting", Meeting),
        *((name, DOUBLE) for name in ("least_step", "largest_step", "eps")),
    ]


@dataclass(frozen=True, slots=True)
class Mamba2Parameters:
    """Hold the parameters of one layer, fp32."""

    conv_weight: Tensor  # [taps, channels], the oldest tap first
    conv_bias: Tensor | None  # [channels]
    step_bias: Tensor  # [heads]
    decay: Tensor  # [heads], below 0
    skip: Tensor  # [heads]
    norm_weight: Tensor | None  # [inner]


class Mamba2Mixer(Mixer[Mamba2Spec]):
    """Run one layer of Mamba-2."""

    def __init__(
        self,
        part: StatePart[Mamba2Spec],
        parameters: Mamba2Parameters,
        projection: LinearKernel,
        output: LinearKernel,
        dtype: torch.dtype,
        collectives: Collectives | None,
    ):
        self._parameters = parameters
        struct = None if unfit(part.spec) else _native_layer(part, parameters, KINDS[dtype], collectives)
        super().__init__(part, projection, output, struct, "baton_mamba2")

    def _token(self, state: Tensor, *row: Tensor) -> tuple[Tensor, Tensor]:
        (inputs, scalars), spec, own = row, self.spec, self._parameters
        channels = convolved(inputs, own.conv_weight, own.conv_bias)
        x, write, read = channels.split((spec.inner_size, *[spec.num_groups * spec.state_size] * 2))
        step = F.softplus(scalars + own.step_bias).clamp(*spec.step_limit).unsqueeze(1)
        x = x.view(spec.num_heads, spec.head_dim)
        write, read = (each.view(spec.num_groups, -1).repeat_interleave(spec.num_heads // spec.num_groups, 0)
                       for each in (write, read))  # fmt: skip
        decay = (step * own.decay.unsqueeze(1)).exp().unsqueeze(2)
        state = state * decay + (step * x).unsqueeze(2) * write.unsqueeze(1)
        return state, ((state * read.unsqueeze(1)).sum(2) + own.skip.unsqueeze(1) * x).flatten()

    def _finish(self, y: Tensor, gates: Tensor) -> Tensor:
        spec, weight = self.spec, self._parameters.norm_weight
        if weight is None or not spec.norm_first:
            y = y * F.silu(gates)
        if weight is not None:
            parts = y.view(spec.norm_groups, -1)
            y = F.rms_norm(parts, parts.shape[1:], eps=spec.eps).flatten() * weight
        return y * F.silu(gates) if weight is not None and spec.norm_first else y


def unfit(spec: Mamba2Spec) -> str:
    """Return why the native kernel cannot compute this; "" if it can."""
    normed = {"size of a norm": spec.inner_size // spec.norm_groups} if spec.norm_groups else {}
    return unfit_sizes(state_size=spec.state_size, inner_size=spec.inner_size, conv_size=spec.conv_size, **normed)


def _native_layer(
    part: StatePart[Mamba2Spec], own: Mamba2Parameters, kind: int, collectives: Collectives | None
) -> _Mamba2:
    """Return the native struct, which holds addresses: the parameters and the collectives must outlive it."""
    spec, num_norms = part.spec, part.whole.norm_groups or 1
    span = part.span_of(num_norms) if spec.norm_groups else 1
    leaves = max(1, MAX_LEAVES // num_norms)  # leaves of a norm over all ranks
    while part.whole.inner_size // num_norms % (leaves * VECTOR):
        leaves //= 2
    return _Mamba2(
        convolution(part, kind, own.conv_weight, own.conv_bias), spec.num_heads, spec.head_dim, spec.num_groups,
        spec.state_size, address(own.step_bias), address(own.decay), address(own.skip), address(own.norm_weight),
        spec.norm_groups or 1, spec.norm_first, part.whole.inner_size // num_norms, leaves // span,
        meeting(part, collectives, span), *spec.step_limit, spec.eps,
    )  # fmt: skip
