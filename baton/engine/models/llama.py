"""The Llama family: Llama 2 to 3.2, Mistral, Qwen2 and Qwen3 differ by biases, q/k norms, windows and rope only."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import Attention
from baton.engine.core.batch import ForwardBatch
from baton.engine.core.device import instruction_set
from baton.engine.core.model_spec import ModelSpec
from baton.engine.kv.pool import KVPool
from baton.engine.layers.activation import VECTOR_STRIDE, swiglu
from baton.engine.layers.embedding import tied
from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.norm import RMSNorm
from baton.engine.layers.rope import Rope
from baton.engine.models.fused import fuse
from baton.engine.models.layer import Layer
from baton.engine.models.linears import Linears, Make
from baton.engine.weights.formats.base import HEAD, WeightSource
from kvtransfer.layout import KVGroup


class Model:
    """A loaded model. One thread at a time may call `forward`: it owns the scratch memory of its attention backend."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, source: WeightSource, make: Make, attention: Attention, rope: Rope
    ):
        """`make(weight, bias)` gives the kernel that applies a weight of any form."""
        self.spec, self.dtype, self.attention, self.rope = spec, dtype, attention, rope
        self.device = attention.shape.device
        self.reasons: dict[str, dict[str, str]] = {}  # attention | linear | layers -> backend -> why not
        linears = Linears(source, make)
        vocab_size, hidden_size = spec.vocab_size, spec.hidden_size
        self.embedding = source.embedding(vocab_size, hidden_size)
        self.layers = [_layer(spec, index, source, linears) for index in range(spec.num_layers)]
        self.norm = RMSNorm(source.tensor("model.norm.weight", hidden_size), spec.norm_eps)
        if spec.tied:
            self.head = linears.make([source.tied_head(self.embedding, vocab_size, hidden_size)])
            self.embedding = tied(self.embedding, self.head)
        else:
            self.head = linears.read([HEAD], [vocab_size], hidden_size, bias=False)
        self.weights = linears.report()
        source.release()
        self.fused, self.reasons["layers"] = fuse(spec, self.layers, attention, rope)

    @property
    def numerics(self) -> tuple[str, ...]:
        """Return what the bits of KV depend on besides weights and dtypes: kernels, instruction set, rope factors."""
        capability = instruction_set(self.device)
        attention, linears = self.attention.name, "+".join(sorted(self.weights.kernels))
        return (attention, self.layers_name, linears, capability, *self.rope.variant)

    @property
    def layers_name(self) -> str:
        """Return what runs the layers: fused (one native call), triton or torch."""
        return "torch" if self.fused is None else self.fused.name

    def kv_group(self, form: str, block_size: int) -> KVGroup:
        """Return the layout of this model's KV in a pool; `form` is a key of kvtransfer.layout.KV_FORMS."""
        return self.spec.kv_group(form, block_size)

    def forward(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Write the KV of all tokens and return logits fp32 [R, vocab_size] of batch.logit_rows.

        `on_layer(layer)` is called when the KV of that layer is written, for all tokens of the step.
        """
        return self.logits(self.hidden(batch, pool, on_layer)[batch.logit_rows])

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, vocab_size] of rows [R, hidden_size] that `hidden` returned."""
        if self.fused is not None:
            return self.head(self.fused.norm(hidden.contiguous(), self.norm.weight)).float()
        return self.head(self.norm(hidden)).float()

    def hidden(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Write the KV of all tokens and return what the last layer leaves, before the final norm: [>= T, hidden_size],
        the rows of the batch first."""
        if self.fused is not None:
            return self.fused(self.embedding(batch.token_ids), batch, pool, on_layer)
        num_tokens = batch.token_ids.shape[0]
        missing = -num_tokens % self.head.row_multiple
        positions = F.pad(batch.positions, (0, missing))
        x = self.embedding(F.pad(batch.token_ids, (0, missing)))
        cos, sin = self.rope.tables(positions, self.dtype)
        plan = self.attention.plan(batch, pool)
        mixed = x.new_zeros(x.shape[0], self.spec.num_heads, self.spec.head_dim)
        for index, layer in enumerate(self.layers):
            q = self._write_kv(layer, index, layer.input_norm(x), cos, sin, batch.slots, pool)
            if on_layer is not None:
                on_layer(index)
            self.attention(plan, index, q, mixed[:num_tokens])
            x = x + layer.output(mixed.flatten(1))
            x = x + layer.down(swiglu(layer.gate_up(layer.mlp_norm(x))))
        return x

    def _write_kv(
        self, layer: Layer, index: int, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: KVPool
    ) -> Tensor:
        """Project and rotate; K and V go to the pool, the queries [T, num_heads, head_dim] are returned."""
        spec = self.spec
        heads = layer.qkv(x).unflatten(1, (-1, spec.head_dim))
        qk, v = heads.split((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if layer.q_norm is not None:
            q, k = qk.split((spec.num_heads, spec.num_kv_heads), dim=1)
            qk = torch.cat((layer.q_norm(q), layer.k_norm(k)), dim=1)
        num_tokens = slots.shape[0]
        q, k = self.rope(qk, cos, sin)[:num_tokens].split((spec.num_heads, spec.num_kv_heads), dim=1)
        pool.write(index, slots, k, v[:num_tokens])
        return q


def _layer(spec: ModelSpec, index: int, source: WeightSource, linears: Linears) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, size = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    padding = -size % VECTOR_STRIDE  # swiglu's rows have the length that it needs

    def linear(names: tuple[str, ...], sizes: tuple[int, ...], in_size: int, bias: bool, **pads: int) -> LinearKernel:
        return linears.read([prefix + name for name in names], sizes, in_size, bias, **pads)

    def norm(name: str, length: int) -> RMSNorm:
        return RMSNorm(source.tensor(f"{prefix}{name}.weight", length), spec.norm_eps)

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(qkv, (q_size, kv_size, kv_size), hidden, spec.qkv_bias),
        q_norm=norm("self_attn.q_norm", spec.head_dim) if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm", spec.head_dim) if spec.qk_norm else None,
        output=linear(("self_attn.o_proj",), (hidden,), q_size, spec.output_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear(("mlp.gate_proj", "mlp.up_proj"), (size, size), hidden, spec.mlp_bias, rows=padding),
        down=linear(("mlp.down_proj",), (hidden,), size, spec.mlp_bias, columns=padding),
    )
