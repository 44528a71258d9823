"""The layers of a step on a GPU, with one Triton kernel for all between two products: RMSNorm and residual,
q/k norm, rotation and the write of KV, SiLU times up."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.engine import kernels
from baton.engine.attention.base import Attention
from baton.engine.core.batch import ForwardBatch
from baton.engine.core.model_spec import ModelSpec
from baton.engine.kv.pool import KVPool
from baton.engine.layers.rope import Rope
from baton.engine.models.layer import Layer

INTERPRETED = ("triton", "triton-fast")  # attention with which the interpreter runs the layers too, on a CPU


class GpuLayers:
    """The layers of one model. Rows are as independent of what shares their batch as their linear layers are."""

    name = "triton"

    def __init__(self, spec: ModelSpec, layers: Sequence[Layer], attention: Attention, ropes: Sequence[Rope]):
        from baton.engine.kernels import kv_write, rows  # triton is an extra

        self._write_kv, self._rows = kv_write.write_kv, rows
        self._spec, self._layers, self._attention, self._ropes = spec, layers, attention, ropes

    @staticmethod
    def unfit(spec: ModelSpec, layers: Sequence[Layer], attention: Attention) -> str:
        """Return why a model's layers cannot be run this way; "" if they can."""
        if reason := kernels.unavailable(attention.shape.device.type):
            return reason
        if reason := spec.beyond_llama():
            return reason
        for layer in layers:
            for part in (layer.qkv, layer.output, layer.gate_up, layer.down):
                if part.row_multiple != 1:
                    return f"linear kernel {part.name} wants padded rows"
        return ""

    def __call__(
        self, x: Tensor, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """x [T, hidden_size], embedded, is changed in place and returned; KV of all layers is written.

        `on_layer(layer)` is called when the write of that layer's KV is launched.
        """
        spec, rows, last = self._spec, self._rows, len(self._layers) - 1
        plan = self._attention.plan(batch, pool)
        tables = [rope.signed_tables for rope in self._ropes]
        mixed = x.new_empty(x.shape[0], spec.num_heads, spec.head_dim)
        normed = self.norm(x, self._layers[0].input_norm.weight)
        for index, layer in enumerate(self._layers):
            turns = tables[spec.layers[index].rope or 0]
            heads = layer.qkv(normed).unflatten(1, (-1, spec.head_dim))
            norms = None if layer.q_norm is None else (layer.q_norm.weight, layer.k_norm.weight, spec.norm.eps)
            q = self._write_kv(heads, spec.num_heads, batch.positions, batch.slots, turns, norms, pool, index)
            if on_layer is not None:
                on_layer(index)
            self._attention(plan, index, q, mixed)
            normed = rows.add_norm(x, layer.output(mixed.flatten(1)), layer.mlp_norm.weight, spec.norm.eps)
            moved = layer.down(rows.swiglu(layer.gate_up(normed)))
            if index < last:
                normed = rows.add_norm(x, moved, self._layers[index + 1].input_norm.weight, spec.norm.eps)
        return torch.add(x, moved, out=x)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of rows x [R, hidden_size], contiguous."""
        return self._rows.add_norm(x, None, weight, self._spec.norm.eps)
