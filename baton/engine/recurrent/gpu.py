"""Layers with a state on a GPU: three launches between the two products, or for Mamba those plus the products of its
rows (kernels/state). Nothing is counted on the host, so steps can be captured as CUDA graphs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import triton
from torch import Tensor

from baton.engine.core.batch import ForwardBatch, SeqTable
from baton.engine.core.state_spec import DeltaNetSpec, Mamba2Spec, MambaSpec, StateSpec
from baton.engine.kernels.rows import add_norm
from baton.engine.kernels.state.chunks import prepare_delta_net, scan_delta_net, scan_mamba2
from baton.engine.kernels.state.finish import finish
from baton.engine.kernels.state.folds import fold_delta_net, fold_mamba, fold_mamba2
from baton.engine.kernels.state.inputs import convolve
from baton.engine.kv.states import StatePool
from baton.engine.layers.linear import LinearKernel
from baton.engine.recurrent.delta_net import LENGTH_EPS, DeltaNetParameters
from baton.engine.recurrent.mamba import MambaParameters
from baton.engine.recurrent.mamba2 import Mamba2Parameters
from baton.protocol import MAX_DRAFT_TOKENS

Spec = TypeVar("Spec", bound=StateSpec)
ROWS, CHANNELS = 8, 128  # that the convolution handles together
CHUNK = 64  # tokens of a prompt handled together: prompts are divided at multiples
# fp32 elements of a state per program: 32 registers for each thread of four warps, or of one.
FOUR_WARPS, ONE_WARP = 4096, 1024
MIN_PRODUCT, CHUNK_VALUES = 16, 32  # the shortest side of a product; values of a head per program
CHUNK_OPTIONS = {"num_warps": 8, "num_stages": 1}
GATED = 1024  # elements of an unnormed row that are handled together


@dataclass(frozen=True, slots=True)
class GpuStatePlan:
    """Describe one step: its sequences on the device, and the pool's states."""

    table: SeqTable
    rows: Tensor  # int32 [S, 4], see kernels/state/inputs.py
    states: StatePool
    num_tokens: int

    @property
    def extra(self) -> int:
        """Return the number of inputs that a sequence may have before its rows."""
        return 0 if self.states.drafts is None else MAX_DRAFT_TOKENS

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_inputs(self) -> int:
        """Return the number of input rows that a step has room for."""
        return self.num_tokens + self.extra * self.num_seqs

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return the states of a layer, counted among those with one, fp32 [blocks, elements] with the first block
        last, and the inputs of proposals, [blocks, MAX_DRAFT_TOKENS, channels and scalars]."""
        drafts = self.states.drafts
        return self.states.blocks[:, layer], None if drafts is None else drafts[:, layer]


class GpuMixer(ABC, Generic[Spec]):
    """Run one whole layer. Rows do not depend on what shares their batch, nor on where chunks of their sequence begin;
    if it is not `exact`, chunks have to begin at multiples of CHUNK for that."""

    _normed_parts = (0, 0)  # number of channel groups that are normed to length one, and their size
    _query_scale = 1.0

    def __init__(
        self,
        spec: Spec,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        projection: LinearKernel,
        output: LinearKernel,
        exact: bool,
    ):
        """Hold conv_weight fp32 [taps, channels] and conv_bias fp32 [channels], on the device. Without `exact`, prompts
        are computed by chunks if the layer has such a form."""
        self.spec, self._exact = spec, exact
        self._conv_weight, self._conv_bias = conv_weight, conv_bias
        self._projection, self._output = projection, output

    @property
    def name(self) -> str:
        """Return what computes the recurrence, for the numerics class."""
        return "triton" if self._exact else "triton-chunks"

    def _chunk(self, plan: GpuStatePlan) -> int:
        """Return CHUNK if sequences of the step may be computed by chunks, else 0."""
        return 0 if self._exact or plan.table.max_query_len < CHUNK else CHUNK

    def plan(self, batch: ForwardBatch, states: StatePool) -> GpuStatePlan:
        """Return what all layers of a step share."""
        table = batch.table or SeqTable.of(batch.seqs, states.blocks.device)
        assert table.states is not None
        return GpuStatePlan(table, table.states, states, len(batch.token_ids))

    def __call__(self, x: Tensor, plan: GpuStatePlan, layer: int) -> Tensor:
        """Fold the rows x [>= T, hidden_size] into the states of `layer`, counted among those with one; return the
        layer's output in the same shape."""
        rows = self._projection(x)
        y = torch.empty(len(rows), self.spec.inner_size, dtype=torch.float32, device=rows.device)
        self._fold(self._convolve(rows, plan, layer), y, plan, layer)
        return self._output(self._finish(y, rows))

    def _convolve(self, rows: Tensor, plan: GpuStatePlan, layer: int) -> Tensor:
        """Return the inputs of the recurrence, fp32 [inputs, channels and scalars]."""
        spec, (num_normed, size) = self.spec, self._normed_parts
        width = spec.conv_size + spec.num_scalars
        inputs = torch.empty(plan.num_inputs, width, dtype=torch.float32, device=rows.device)
        block = max(CHANNELS, triton.next_power_of_2(size))
        num_parts = num_normed + triton.cdiv(width - num_normed * size, block)
        states, drafts = plan.of_layer(layer)
        convolve[(plan.num_seqs, num_parts)](
            rows, self._conv_weight, self._conv_bias, states, drafts, inputs, *self._sequences(plan),
            states.stride(0), 0 if drafts is None else drafts.stride(0), rows.stride(0), spec.inner_size,
            spec.conv_size, spec.num_scalars, LENGTH_EPS, self._query_scale, TAPS=spec.taps, EXTRA=plan.extra,
            NUM_NORMED=num_normed, NORM_SIZE=size, BLOCK_T=ROWS, BLOCK=block, enable_fp_fusion=False,
        )  # fmt: skip
        return inputs

    @staticmethod
    def _sequences(plan: GpuStatePlan) -> tuple[Tensor, Tensor, Tensor, int]:
        return plan.rows, plan.table.query_starts, plan.table.kv_lens, len(plan.states) - 1

    @abstractmethod
    def _fold(self, inputs: Tensor, y: Tensor, plan: GpuStatePlan, layer: int) -> None:
        """Fold all inputs of a step into their states; put the outputs in y, fp32 [T, inner]."""

    def _finish(self, y: Tensor, rows: Tensor) -> Tensor:
        """Return y fp32 [T, inner] gated by the projected rows [T, ..], in their dtype."""
        return self._finished(y, rows, None, 0, 0.0, False, False)

    def _finished(
        self, y: Tensor, rows: Tensor, weight: Tensor | None, size: int, eps: float, norm_first: bool, shared: bool
    ) -> Tensor:
        inner, size = self.spec.inner_size, size or GATED
        out = torch.empty(y.shape, dtype=rows.dtype, device=rows.device)
        finish[(len(y), triton.cdiv(inner, size))](
            y, rows, weight, out, rows.stride(0), inner, size, eps, NORMED=weight is not None, NORM_FIRST=norm_first,
            SHARED=shared, BLOCK=triton.next_power_of_2(size), num_warps=8 if size > 2048 else 4,
            enable_fp_fusion=False,
        )  # fmt: skip
        return out


class GpuMamba2(GpuMixer[Mamba2Spec]):
    """Run one layer of Mamba-2 on a GPU."""

    def __init__(
        self,
        spec: Mamba2Spec,
        parameters: Mamba2Parameters,
        projection: LinearKernel,
        output: LinearKernel,
        exact: bool,
    ):
        super().__init__(spec, parameters.conv_weight, parameters.conv_bias, projection, output, exact)
        self._parameters = parameters

    def _fold(self, inputs: Tensor, y: Tensor, plan: GpuStatePlan, layer: int) -> None:
        spec, own, states = self.spec, self._parameters, plan.of_layer(layer)[0]
        columns = max(MIN_PRODUCT, triton.next_power_of_2(spec.state_size))
        block = min(triton.next_power_of_2(spec.head_dim), max(1, FOUR_WARPS // columns))
        given = (
            inputs, own.step_bias, own.decay, own.skip, states, y, *self._sequences(plan), states.stride(0),
            spec.tail_elements, spec.num_heads, spec.num_heads // spec.num_groups, spec.head_dim, spec.state_size,
            inputs.shape[1], spec.inner_size, *spec.step_limit,
        )  # fmt: skip
        constants = {"EXTRA": plan.extra, "BLOCK_N": columns, "num_warps": 4, "enable_fp_fusion": False}
        if chunk := self._chunk(plan):
            wide = max(MIN_PRODUCT, block)
            scan_mamba2[(plan.num_seqs, spec.num_heads, triton.cdiv(spec.head_dim, wide))](
                *given, CHUNK=chunk, BLOCK_P=wide, **constants | CHUNK_OPTIONS
            )
        fold_mamba2[(plan.num_seqs, spec.num_heads, triton.cdiv(spec.head_dim, block))](
            *given, CHUNK=chunk, BLOCK_P=block, **constants
        )

    def _finish(self, y: Tensor, rows: Tensor) -> Tensor:
        spec, weight = self.spec, self._parameters.norm_weight
        if weight is None:
            return super()._finish(y, rows)
        size = spec.inner_size // spec.norm_groups
        return self._finished(y, rows, weight, size, spec.eps, spec.norm_first, False)


class GpuDeltaNet(GpuMixer[DeltaNetSpec]):
    """Run one layer of gated delta net on a GPU."""

    def __init__(
        self,
        spec: DeltaNetSpec,
        parameters: DeltaNetParameters,
        projection: LinearKernel,
        output: LinearKernel,
        exact: bool,
    ):
        super().__init__(spec, parameters.conv_weight, None, projection, output, exact)
        self._parameters = parameters
        self._normed_parts, self._query_scale = (2 * spec.num_key_heads, spec.key_dim), spec.key_dim**-0.5

    def _fold(self, inputs: Tensor, y: Tensor, plan: GpuStatePlan, layer: int) -> None:
        spec, own, states = self.spec, self._parameters, plan.of_layer(layer)[0]
        keys = max(MIN_PRODUCT, triton.next_power_of_2(spec.key_dim))
        block, width = max(8, ONE_WARP // keys), inputs.shape[1]
        of_heads = spec.num_heads, spec.num_heads // spec.num_key_heads, spec.num_key_heads * spec.key_dim, spec.key_dim
        rest = states, y, *self._sequences(plan), states.stride(0), spec.tail_elements, *of_heads
        rest = *rest, spec.value_dim, width, spec.inner_size
        constants = {"EXTRA": plan.extra, "BLOCK_K": keys, "enable_fp_fusion": False}
        if chunk := self._chunk(plan):
            solved = torch.empty(plan.num_tokens, spec.num_heads, chunk, dtype=torch.float32, device=y.device)
            prepare_delta_net[(plan.num_seqs, spec.num_heads, plan.table.max_query_len // chunk)](
                inputs, own.step_bias, own.decay, solved, *self._sequences(plan)[:3], *of_heads, width, CHUNK=chunk,
                num_warps=4, **constants,
            )  # fmt: skip
            wide = min(CHUNK_VALUES, max(MIN_PRODUCT, triton.next_power_of_2(spec.value_dim)))
            scan_delta_net[(plan.num_seqs, spec.num_heads, triton.cdiv(spec.value_dim, wide))](
                inputs, own.step_bias, own.decay, solved, *rest, CHUNK=chunk, BLOCK_V=wide, **constants | CHUNK_OPTIONS
            )
        fold_delta_net[(plan.num_seqs, spec.num_heads, triton.cdiv(spec.value_dim, block))](
            inputs, own.step_bias, own.decay, *rest, CHUNK=chunk, BLOCK_V=block, num_warps=1, **constants
        )

    def _finish(self, y: Tensor, rows: Tensor) -> Tensor:
        spec = self.spec
        return self._finished(y, rows, self._parameters.norm_weight, spec.value_dim, spec.eps, True, True)


class GpuMamba(GpuMixer[MambaSpec]):
    """Run one layer of Mamba, in Jamba's form, on a GPU."""

    def __init__(
        self,
        spec: MambaSpec,
        parameters: MambaParameters,
        projection: LinearKernel,
        output: LinearKernel,
        dtype: torch.dtype,
    ):
        super().__init__(spec, parameters.conv_weight, parameters.conv_bias, projection, output, True)
        self._parameters, self._dtype = parameters, dtype

    def _fold(self, inputs: Tensor, y: Tensor, plan: GpuStatePlan, layer: int) -> None:
        spec, own, states = self.spec, self._parameters, plan.of_layer(layer)[0]
        selected = own.selection(inputs.to(self._dtype)).float()[:, : sum(spec.selected_sizes)]
        raw, written, read = (
            add_norm(part.contiguous(), None, weight, spec.eps)
            for part, weight in zip(selected.split(spec.selected_sizes, dim=1), own.norms, strict=True)
        )
        steps = own.steps(raw.to(self._dtype))
        rows = triton.next_power_of_2(spec.state_size)
        block = max(16, ONE_WARP // rows)
        fold_mamba[(plan.num_seqs, triton.cdiv(spec.inner_size, block))](
            inputs, steps, written, read, own.decay, own.skip, states, y, *self._sequences(plan), states.stride(0),
            spec.tail_elements, spec.state_size, spec.inner_size, EXTRA=plan.extra, BLOCK_N=rows, BLOCK_C=block,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
