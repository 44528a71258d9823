"""Gated delta net (arXiv 2412.06464) between its two products: convolution, recurrence, norm, gates. In C++
(native/layers/delta_net.cpp), or here in torch.

    state = g state       state = state + k (b (v - k state))       y = q state

The state of each head is [key_dim, value_dim] in fp32. g is how much is kept, b how much of a key's value is replaced;
queries and keys have length one.
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.native import KINDS
from baton.engine.core.state_spec import DeltaNetSpec
from baton.engine.layers.linear import LinearKernel
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.state_part import StatePart
from baton.engine.recurrent.mixer import Mixer, convolved
from baton.engine.recurrent.native import (
    DOUBLE,
    INT,
    POINTER,
    Convolution,
    Meeting,
    address,
    convolution,
    meeting,
    unfit_sizes,
)

LENGTH_EPS = 1e-6  # added to squared lengths of queries and keys


class _DeltaNet(ctypes.Structure):
    """Mirror `DeltaNet` of native/layers/delta_net.cpp."""

    _fields_ = [
        ("conv", Convolution),
        *((name, INT) for name in ("num_heads", "num_key_heads", "key_dim", "value_dim")),
        *((name, POINTER) for name in ("step_bias", "decay", "norm_weight")),
        ("meeting", Meeting),
        *((name, DOUBLE) for name in ("eps", "length_eps")),
    ]


@dataclass(frozen=True, slots=True)
class DeltaNetParameters:
    """Hold the parameters of one layer, fp32."""

    conv_weight: Tensor  # [taps, channels], the oldest tap first
    step_bias: Tensor  # [heads]
    decay: Tensor  # [heads], below 0
    norm_weight: Tensor  # [value_dim], the same for every head


class DeltaNetMixer(Mixer[DeltaNetSpec]):
    """Run one layer of gated delta net."""

    def __init__(
        self,
        part: StatePart[DeltaNetSpec],
        parameters: DeltaNetParameters,
        projection: LinearKernel,
        output: LinearKernel,
        dtype: torch.dtype,
        collectives: Collectives | None,
    ):
        self._parameters = parameters
        struct = None if unfit(part.spec) else _native_layer(part, parameters, KINDS[dtype], collectives)
        super().__init__(part, projection, output, struct, "baton_delta_net")

    def _token(self, state: Tensor, *row: Tensor) -> tuple[Tensor, Tensor]:
        (inputs, scalars), spec, own = row, self.spec, self._parameters
        keys = spec.num_key_heads * spec.key_dim
        query, key, value = convolved(inputs, own.conv_weight, None).split((keys, keys, spec.inner_size))
        query, key = self._of_length_one(query) * spec.key_dim**-0.5, self._of_length_one(key)
        written, raw_step = scalars.view(2, -1, 1)
        step = F.softplus(raw_step + own.step_bias.unsqueeze(1))
        state = state * (step * own.decay.unsqueeze(1)).exp().unsqueeze(2)
        known = (state * key).sum(1)
        change = (value.view(spec.num_heads, -1) - known) * written.sigmoid()
        state = state + key * change.unsqueeze(1)
        return state, (state * query).sum(1).flatten()

    def _of_length_one(self, rows: Tensor) -> Tensor:
        """Norm the rows of all key heads to length one -> [heads, key_dim, 1], each repeated for the heads that it
        serves."""
        spec = self.spec
        rows = rows.view(spec.num_key_heads, spec.key_dim)
        rows = rows * ((rows * rows).sum(1, keepdim=True) + LENGTH_EPS).rsqrt()
        return rows.repeat_interleave(spec.num_heads // spec.num_key_heads, 0).unsqueeze(2)

    def _finish(self, y: Tensor, gates: Tensor) -> Tensor:
        heads = y.view(self.spec.num_heads, -1)
        normed = F.rms_norm(heads, heads.shape[1:], self._parameters.norm_weight, self.spec.eps)
        return normed.flatten() * F.silu(gates)


def unfit(spec: DeltaNetSpec) -> str:
    """Return why the native kernel cannot compute this; "" if it can."""
    return unfit_sizes(linear_key_head_dim=spec.key_dim, linear_value_head_dim=spec.value_dim)


def _native_layer(
    part: StatePart[DeltaNetSpec], own: DeltaNetParameters, kind: int, collectives: Collectives | None
) -> _DeltaNet:
    """Return the native struct, which holds addresses: the parameters and the collectives must outlive it."""
    spec = part.spec
    return _DeltaNet(
        convolution(part, kind, own.conv_weight, None), spec.num_heads, spec.num_key_heads, spec.key_dim,
        spec.value_dim, address(own.step_bias), address(own.decay), address(own.norm_weight),
        meeting(part, collectives), spec.eps, LENGTH_EPS,
    )  # fmt: skip
