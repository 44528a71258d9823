"""Mamba-2 between its two products: convolution, recurrence, gates, norm. In C++ (native/layers/mamba2.cpp), or here in
torch: the text to read.

    state = state * exp(dt A) + (dt x) B       y = state C + D x       [head_dim, state_size] of each head, fp32
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine import native
from baton.engine.attention.native import KINDS
from baton.engine.core.batch import SeqSlice
from baton.engine.core.state_spec import Mamba2Spec
from baton.engine.layers.linear import LinearKernel
from baton.engine.recurrent.plan import StatePlan

VECTOR = 16  # elements, of the native kernel
_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Convolution(ctypes.Structure):
    """`Convolution` of native/layers/convolution.h."""

    _fields_ = [
        *((name, _INT) for name in ("kind", "first", "size", "taps", "row_size", "num_scalars", "first_scalar")),
        *((name, _POINTER) for name in ("weight", "bias")),
    ]


class _Mamba2(ctypes.Structure):
    """`Mamba2` of native/layers/mamba2.cpp."""

    _fields_ = [
        ("conv", _Convolution),
        *((name, _INT) for name in ("num_heads", "head_dim", "num_groups", "state_size")),
        *((name, _POINTER) for name in ("step_bias", "decay", "skip", "norm_weight")),
        *((name, _INT) for name in ("num_norm_groups", "norm_first")),
        *((name, _DOUBLE) for name in ("least_step", "largest_step", "eps")),
    ]


@dataclass(frozen=True, slots=True)
class Mamba2Parameters:
    """Of one layer, fp32."""

    conv_weight: Tensor  # [taps, channels], the oldest tap first
    conv_bias: Tensor | None  # [channels]
    step_bias: Tensor  # [heads]
    decay: Tensor  # [heads], below 0
    skip: Tensor  # [heads]
    norm_weight: Tensor | None  # [inner]


class Mamba2Mixer:
    """One layer. Rows do not depend on what else is in their batch, nor on where chunks of their sequence begin."""

    def __init__(
        self, spec: Mamba2Spec, parameters: Mamba2Parameters, projection: LinearKernel, output: LinearKernel,
        dtype: torch.dtype,
    ):  # fmt: skip
        self.spec, self._parameters, self._projection, self._output = spec, parameters, projection, output
        self._native: _Mamba2 | None = None
        if not unfit(spec):
            self._native = _native_layer(spec, parameters, KINDS[dtype])
            arguments = (_POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT)
            library = native.library()
            assert library is not None
            self._call = library.function("baton_mamba2", *arguments)

    @property
    def name(self) -> str:
        """Return what computes the recurrence: native or torch."""
        return "torch" if self._native is None else "native"

    def __call__(self, x: Tensor, plan: StatePlan, layer: int) -> Tensor:
        """Fold the rows x [>= T, hidden_size] into the states that layer `layer` of those with a state keeps -> what it
        adds, of the same shape."""
        rows = self._projection(x)
        mixed = rows.new_zeros(len(rows), self.spec.inner_size)
        if self._native is None:
            for seq in plan.seqs:
                self._fold(rows, mixed, seq, plan, layer)
        else:
            segments, threads = plan.segments(layer), torch.get_num_threads()
            rows = rows.contiguous()
            self._call(
                ctypes.addressof(self._native), segments.ctypes.data, len(segments), rows.data_ptr(), mixed.data_ptr(),
                threads,
            )  # fmt: skip
        return self._output(mixed)

    def _fold(self, rows: Tensor, mixed: Tensor, seq: SeqSlice, plan: StatePlan, layer: int) -> None:
        """Do the rows of one sequence, token by token."""
        held = seq.held_state
        spec, state, num_pending = self.spec, plan.state(seq, layer), held.num_pending
        own = slice(seq.query_start, seq.query_start + seq.query_len)
        gates, channels, steps = rows[own].float().split((spec.inner_size, spec.conv_size, spec.num_heads), dim=1)
        if seq.kv_len == seq.query_len:
            state.zero_()
        if num_pending:
            kept = plan.drafts(seq, layer)[:num_pending]
            channels = torch.cat((kept[:, : spec.conv_size], channels))
            steps = torch.cat((kept[:, spec.conv_size :], steps))
        num_kept = len(channels) - held.num_drafts
        tail = state[: spec.tail_elements].view(spec.taps - 1, spec.conv_size)
        recurrence = state[spec.tail_elements : spec.num_elements].view(spec.num_heads, spec.head_dim, spec.state_size)
        inputs = torch.cat((tail, channels))
        current, outputs = recurrence.clone(), []
        for row in range(len(channels)):
            current, y = self._token(current, inputs[row : row + spec.taps], steps[row])
            outputs.append(y)
            if row + 1 == num_kept:
                recurrence.copy_(current)
        tail.copy_(inputs[num_kept : num_kept + spec.taps - 1])
        if held.num_drafts:
            plan.drafts(seq, layer)[: held.num_drafts] = torch.cat((channels, steps), dim=1)[num_kept:]
        y = torch.stack(outputs[num_pending:])
        mixed[own] = torch.stack([self._finish(*row) for row in zip(y, gates, strict=True)]).to(mixed.dtype)

    def _token(self, state: Tensor, inputs: Tensor, raw_step: Tensor) -> tuple[Tensor, Tensor]:
        """State [heads, head_dim, state_size], the convolution's inputs [taps, channels], steps [heads] -> the state
        behind the token and its row [inner]."""
        spec, own = self.spec, self._parameters
        channels = (inputs * own.conv_weight).sum(0)
        channels = F.silu(channels if own.conv_bias is None else channels + own.conv_bias)
        x, write, read = channels.split((spec.inner_size, *[spec.num_groups * spec.state_size] * 2))
        step = F.softplus(raw_step + own.step_bias).clamp(*spec.step_limit).unsqueeze(1)
        x = x.view(spec.num_heads, spec.head_dim)
        write, read = (each.view(spec.num_groups, -1).repeat_interleave(spec.num_heads // spec.num_groups, 0)
                       for each in (write, read))  # fmt: skip
        decay = (step * own.decay.unsqueeze(1)).exp().unsqueeze(2)
        state = state * decay + (step * x).unsqueeze(2) * write.unsqueeze(1)
        return state, ((state * read.unsqueeze(1)).sum(2) + own.skip.unsqueeze(1) * x).flatten()

    def _finish(self, y: Tensor, gates: Tensor) -> Tensor:
        """Gate and norm a row [inner]."""
        spec, weight = self.spec, self._parameters.norm_weight
        if weight is None or not spec.norm_first:
            y = y * F.silu(gates)
        if weight is not None:
            parts = y.view(spec.norm_groups, -1)
            y = F.rms_norm(parts, parts.shape[1:], eps=spec.eps).flatten() * weight
        return y * F.silu(gates) if weight is not None and spec.norm_first else y


def unfit(spec: Mamba2Spec) -> str:
    """Return why the native kernel cannot compute this; "" if it can."""
    if native.library() is None:
        return native.reason()
    for name in ("state_size", "inner_size", "conv_size"):
        if getattr(spec, name) % VECTOR:
            return f"{name} {getattr(spec, name)} is not a multiple of {VECTOR}"
    if spec.norm_groups and spec.inner_size // spec.norm_groups % VECTOR:
        return f"norms of {spec.inner_size // spec.norm_groups} elements are not multiples of {VECTOR}"
    return ""


def _native_layer(spec: Mamba2Spec, own: Mamba2Parameters, kind: int) -> _Mamba2:
    """Holds addresses: the parameters must live as long."""

    def address(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    conv = _Convolution(
        kind, spec.inner_size, spec.conv_size, spec.taps, spec.projected_size, spec.num_scalars,
        spec.inner_size + spec.conv_size, address(own.conv_weight), address(own.conv_bias),
    )  # fmt: skip
    return _Mamba2(
        conv, spec.num_heads, spec.head_dim, spec.num_groups, spec.state_size, address(own.step_bias),
        address(own.decay), address(own.skip), address(own.norm_weight), spec.norm_groups or 1, spec.norm_first,
        *spec.step_limit, spec.eps,
    )  # fmt: skip
