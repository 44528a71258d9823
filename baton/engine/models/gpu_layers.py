"""Run the layers of a step on a GPU, with a single Triton kernel between two products: RMSNorm and residual; q/k norm,
rotation and writing KV; SiLU times up. Experts have their own launches (layers/grouped.py)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.engine import kernels
from baton.engine.attention.base import Attention
from baton.engine.core.batch import ForwardBatch
from baton.engine.core.model_spec import ModelSpec
from baton.engine.kv.pool import KVPool
from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.rope import Rope
from baton.engine.models.layer import Layer

# Attention backends with which the interpreter also runs the layers, on a CPU.
INTERPRETED_ATTENTION = ("triton", "triton-fast")


class GpuLayers:
    """Run the layers of one model. Rows are as independent of what shares their batch as their linear layers are."""

    name = "triton"

    def __init__(self, spec: ModelSpec, layers: Sequence[Layer | None], attention: Attention, ropes: Sequence[Rope]):
        from baton.engine.kernels import kv_write, rows  # triton is an optional dependency
        from baton.engine.layers.linear.triton import GpuLinear

        self._write_kv, self._rows, self._gpu_linear = kv_write.write_kv, rows, GpuLinear
        self._own = [index for index, layer in enumerate(layers) if layer is not None]  # those of this stage
        self._layers = [layer for layer in layers if layer is not None]
        self._spec, self._attention, self._ropes = spec, attention, ropes

    @staticmethod
    def unfit(spec: ModelSpec, layers: Sequence[Layer | None], attention: Attention) -> str:
        """Return why a model's layers cannot be run this way; "" if they can."""
        if reason := kernels.unavailable(attention.shape.device.type):
            return reason
        if reason := spec.differs_from_llama(experts=True):
            return reason
        for layer in filter(None, layers):
            for part in filter(None, (layer.qkv, layer.output, layer.gate_up, layer.down)):
                if part.row_multiple != 1:
                    return f"linear kernel {part.name} wants padded rows"
        return ""

    def __call__(
        self, x: Tensor, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Change x [T, hidden_size], embedded, in place and return it, and write the KV of all layers.

        `on_layer(layer)` is called when the write of that layer's KV is launched on all ranks.
        """
        spec, moved = self._spec, None
        plan = self._attention.plan(batch, pool)
        tables = [rope.signed_tables for rope in self._ropes]
        num_heads = self._attention.shape.num_heads  # of a rank: its own
        mixed = x.new_empty(x.shape[0], num_heads, spec.head_dim)
        for index, layer in enumerate(self._layers):
            turns = tables[spec.layers[self._own[index]].rope or 0]
            heads = self._after_norm(x, moved, layer.input_norm.weight, layer.qkv).unflatten(1, (-1, spec.head_dim))
            norms = None if layer.q_norm is None else (layer.q_norm.weight, layer.k_norm.weight, spec.norm.eps)
            q = self._write_kv(heads, num_heads, batch.positions, batch.slots, turns, norms, pool, index)
            self._attention(plan, index, q, mixed)
            del heads, q  # 160 MiB for 8,192 tokens of an 8B model, which the MLP does not need
            attended = layer.output(mixed.flatten(1))
            if on_layer is not None:  # only now: after this sum every rank has written its heads
                on_layer(index)
            if layer.experts is not None:
                moved = layer.experts(self._rows.add_norm(x, attended, layer.mlp_norm.weight, spec.norm.eps))
            else:
                # Unnamed, since a name would keep it beside the next layer's: 448 MiB for 8,192 tokens of an 8B model.
                moved = self._after_swiglu(
                    self._after_norm(x, attended, layer.mlp_norm.weight, layer.gate_up), layer.down
                )
        return torch.add(x, moved, out=x)

    def _after_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, linear: LinearKernel) -> Tensor:
        """Add delta to x; return the product of its RMSNorm, which is rounded in the same kernel if the product wants
        that."""
        rows, eps = self._rows, self._spec.norm.eps
        if isinstance(linear, self._gpu_linear) and linear.rounding is not None:
            return linear.of_rounded(rows.add_norm_rounded(x, delta, weight, eps, linear.rounding))
        return linear(rows.add_norm(x, delta, weight, eps))

    def _after_swiglu(self, gate_up: Tensor, linear: LinearKernel) -> Tensor:
        if isinstance(linear, self._gpu_linear) and linear.rounding is not None:
            return linear.of_rounded(self._rows.swiglu_rounded(gate_up, linear.rounding))
        return linear(self._rows.swiglu(gate_up))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply RMSNorm to rows x [R, hidden_size], contiguous."""
        return self._rows.add_norm(x, None, weight, self._spec.norm.eps)
