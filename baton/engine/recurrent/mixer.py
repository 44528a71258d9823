"""The common part of layers with a state: a product before and one after a fold over the tokens of each sequence, done
in C++ (native/layers) or here in torch, the version to read."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine import native
from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.core.model_errors import ModelError
from baton.engine.core.state_spec import StateSpec
from baton.engine.kv.states import StatePool
from baton.engine.layers.linear import LinearKernel
from baton.engine.parallel.collectives import check
from baton.engine.parallel.state_part import StatePart
from baton.engine.recurrent.native import INT, POINTER
from baton.engine.recurrent.plan import StatePlan

Spec = TypeVar("Spec", bound=StateSpec)


class Mixer(ABC, Generic[Spec]):
    """Run one layer. Rows do not depend on what shares their batch, nor on where chunks of their sequence begin."""

    def __init__(
        self,
        part: StatePart[Spec],
        projection: LinearKernel,
        output: LinearKernel,
        struct: ctypes.Structure | None,
        function: str,
    ):
        """Run the layer's `struct` by the native `function`; without a struct torch computes it, but only a whole
        layer. Raises ModelError for a part of one."""
        if struct is None and (degree := part.shard.degree) > 1:
            needed = "native kernels for layers with a state, whose sizes are multiples of 16"
            raise ModelError(f"tensor_parallel {degree}: needs {needed}: a rank would have {part.spec}")
        self.spec: Spec = part.spec
        self._projection, self._output, self._native = projection, output, struct
        if struct is not None:
            library = native.library()
            assert library is not None
            self._call = library.function(function, POINTER, POINTER, INT, POINTER, POINTER, INT, restype=INT)

    def _rows(self, inputs: Tensor, scalars: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Yield what `_token` takes of each row, from inputs of the convolution [taps - 1 + T, channels] and scalars
        [T, scalars]."""
        return ((inputs[row : row + self.spec.taps], own) for row, own in enumerate(scalars))

    @abstractmethod
    def _token(self, state: Tensor, *row: Tensor) -> tuple[Tensor, Tensor]:
        """Fold a token, as `_rows` yields it, into the state [*recurrence_shape]; return the new state and the token's
        row [inner]."""

    @abstractmethod
    def _finish(self, y: Tensor, gates: Tensor) -> Tensor:
        """Gate and norm a row [inner]."""

    @property
    def name(self) -> str:
        """Return what computes the recurrence: native or torch."""
        return "torch" if self._native is None else "native"

    def plan(self, batch: ForwardBatch, states: StatePool) -> StatePlan:
        """Return what all layers of a step share."""
        return StatePlan(self.spec, batch, states)

    def __call__(self, x: Tensor, plan: StatePlan, layer: int) -> Tensor:
        """Fold the rows x [>= T, hidden_size] into the states of `layer`, counted among those with one; return the
        layer's output in the same shape."""
        rows = self._projection(x)
        mixed = rows.new_zeros(len(rows), self.spec.inner_size)
        if self._native is None:
            for seq in plan.seqs:
                self._fold(rows, mixed, seq, plan, layer)
        else:
            self._mix(rows.contiguous(), mixed, plan.segments(layer))
        return self._output(mixed)

    def _mix(self, rows: Tensor, out: Tensor, segments: np.ndarray) -> None:
        """Compute all rows of a step natively."""
        assert self._native is not None
        pointers = segments.ctypes.data, len(segments), rows.data_ptr(), out.data_ptr()
        check(self._call(ctypes.addressof(self._native), *pointers, torch.get_num_threads()))

    def _fold(self, rows: Tensor, mixed: Tensor, seq: SeqSlice, plan: StatePlan, layer: int) -> None:
        """Compute the rows of one sequence, token by token."""
        held = seq.held_state
        spec, state, num_pending = self.spec, plan.state(seq, layer), held.num_pending
        own = slice(seq.query_start, seq.query_start + seq.query_len)
        gates, channels, scalars = rows[own].float().split((spec.inner_size, spec.conv_size, spec.num_scalars), dim=1)
        if seq.kv_len == seq.query_len:
            state.zero_()
        if num_pending:
            kept = plan.drafts(seq, layer)[:num_pending]
            channels = torch.cat((kept[:, : spec.conv_size], channels))
            scalars = torch.cat((kept[:, spec.conv_size :], scalars))
        num_kept = len(channels) - held.num_drafts
        tail = state[: spec.tail_elements].view(spec.taps - 1, spec.conv_size)
        recurrence = state[spec.tail_elements : spec.num_elements].view(spec.recurrence_shape)
        inputs = torch.cat((tail, channels))
        current, outputs = recurrence.clone(), []
        for row, own_row in enumerate(self._rows(inputs, scalars)):
            current, y = self._token(current, *own_row)
            outputs.append(y)
            if row + 1 == num_kept:
                recurrence.copy_(current)
        tail.copy_(inputs[num_kept : num_kept + spec.taps - 1])
        if held.num_drafts:
            plan.drafts(seq, layer)[: held.num_drafts] = torch.cat((channels, scalars), dim=1)[num_kept:]
        y = torch.stack(outputs[num_pending:])
        mixed[own] = torch.stack([self._finish(*row) for row in zip(y, gates, strict=True)]).to(mixed.dtype)


def convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve inputs with weight [taps, channels] each, and activate -> a row [channels]."""
    row = (inputs * weight).sum(0)
    return F.silu(row if bias is None else row + bias)
