"""Mamba in Jamba's form, between its first and last product: convolution, products of its rows, recurrence, gates.

state = state * exp(dt A) + (dt x) B       y = state C + D x       [inner, state_size], fp32
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine import native
from baton.engine.attention.native import KINDS
from baton.engine.core.state_spec import MambaSpec
from baton.engine.layers.activation import by_rows
from baton.engine.layers.linear import LinearKernel
from baton.engine.parallel.state_part import StatePart
from baton.engine.recurrent.mixer import Mixer, convolved
from baton.engine.recurrent.native import INT, POINTER, Convolution, address, convolution, unfit_sizes
from baton.engine.recurrent.plan import NUM_NEW, NUM_PENDING


class _Mamba(ctypes.Structure):
    """Mirror `Mamba` of native/layers/mamba.cpp."""

    _fields_ = [("conv", Convolution), ("state_size", INT), ("decay", POINTER), ("skip", POINTER)]


class _Selected(ctypes.Structure):
    """Mirror `Selected` of native/layers/mamba.cpp."""

    _fields_ = [(name, POINTER) for name in ("x", "steps", "written", "read")]


@dataclass(frozen=True, slots=True)
class MambaParameters:
    """Hold the parameters of one layer, fp32 apart from the kernels."""

    conv_weight: Tensor  # [taps, channels], the oldest tap first
    conv_bias: Tensor | None  # [channels]
    selection: LinearKernel  # a row -> the inputs of steps, what is written, what is read; maybe padding after them
    norms: tuple[Tensor, ...]  # weights for each of the three
    steps: LinearKernel  # inputs of steps -> a step for each element
    decay: Tensor  # [state_size, inner], below 0
    skip: Tensor  # [inner]


class MambaMixer(Mixer[MambaSpec]):
    """Run one layer of Mamba."""

    def __init__(
        self,
        part: StatePart[MambaSpec],
        parameters: MambaParameters,
        projection: LinearKernel,
        output: LinearKernel,
        dtype: torch.dtype,
    ):
        self._parameters, self._dtype = parameters, dtype
        struct = None if unfit(part.spec) else _native_layer(part, parameters, KINDS[dtype])
        super().__init__(part, projection, output, struct, "baton_mamba_convolve")
        if struct is not None:
            arguments = (POINTER, POINTER, POINTER, INT, POINTER, POINTER, INT)
            library = native.library()
            assert library is not None
            self._scan = library.function("baton_mamba_scan", *arguments)

    def _rows(self, inputs: Tensor, scalars: Tensor) -> Iterable[tuple[Tensor, ...]]:
        own = self._parameters
        rows = [convolved(tokens, own.conv_weight, own.conv_bias) for tokens, _ in super()._rows(inputs, scalars)]
        return zip(rows, *self._select(torch.stack(rows)), strict=True)

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Select from convolved rows fp32 [T, inner] -> steps [T, inner], what is written and what is read [T,
        state_size]. Rows do not depend on each other."""
        spec, own = self.spec, self._parameters
        selected = own.selection(x.to(self._dtype)).float()[:, : sum(spec.selected_sizes)]
        parts = selected.split(spec.selected_sizes, dim=1)
        raw, written, read = (
            F.rms_norm(part.contiguous(), part.shape[1:], weight, spec.eps)
            for part, weight in zip(parts, own.norms, strict=True)
        )
        return by_rows(F.softplus, own.steps(raw.to(self._dtype)).float()), written, read

    def _mix(self, rows: Tensor, out: Tensor, segments: np.ndarray) -> None:
        assert self._native is not None
        x = torch.empty(int(segments[:, NUM_NEW].sum() + segments[:, NUM_PENDING].sum()), self.spec.inner_size)
        super()._mix(rows, x, segments)
        parts = [part.contiguous() for part in (x, *self._select(x))]
        selected = _Selected(*(part.data_ptr() for part in parts))
        self._scan(
            ctypes.addressof(self._native), ctypes.addressof(selected), segments.ctypes.data, len(segments),
            rows.data_ptr(), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip

    def _token(self, state: Tensor, *row: Tensor) -> tuple[Tensor, Tensor]:
        (x, step, written, read), own = row, self._parameters
        state = state * (step * own.decay).exp() + (step * x) * written.unsqueeze(1)
        return state, (state * read.unsqueeze(1)).sum(0) + own.skip * x

    def _finish(self, y: Tensor, gates: Tensor) -> Tensor:
        return y * F.silu(gates)


def unfit(spec: MambaSpec) -> str:
    """Return why the native kernel cannot compute this; "" if it can."""
    return unfit_sizes(inner_size=spec.inner_size)


def _native_layer(part: StatePart[MambaSpec], own: MambaParameters, kind: int) -> _Mamba:
    """Return the native struct, which holds addresses: the parameters must outlive it."""
    conv = convolution(part, kind, own.conv_weight, own.conv_bias)
    return _Mamba(conv, part.spec.state_size, address(own.decay), address(own.skip))
