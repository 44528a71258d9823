"""The Llama family: Llama 2 to 3.2, Mistral, Qwen2 and Qwen3 differ by biases, q/k norms, windows and rope only."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import Attention
from baton.engine.batch import ForwardBatch
from baton.engine.kv.pool import KVPool
from baton.engine.layers.activation import VECTOR_STRIDE, swiglu
from baton.engine.layers.embedding import Embedding
from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.norm import RMSNorm
from baton.engine.layers.rope import Rope
from baton.engine.models.spec import ModelSpec
from kvtransfer.layout import KVGroup

Read = Callable[..., Tensor]  # (tensor name, *shape) -> tensor in the compute dtype
Linear = Callable[[Tensor, Tensor | None], LinearKernel]  # (weight, bias) -> kernel


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; q, k, v are one product, gate and up another."""

    input_norm: RMSNorm
    qkv: LinearKernel
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: LinearKernel
    mlp_norm: RMSNorm
    gate_up: LinearKernel
    down: LinearKernel


class Model:
    """A loaded model. One thread at a time may call `forward`: it owns the scratch memory of its attention backend."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, read: Read, linear: Linear, attention: Attention, rope: Rope
    ):
        self.spec, self.dtype, self.attention, self.rope = spec, dtype, attention, rope
        self.reasons: dict[str, dict[str, str]] = {}  # attention | linear -> backend -> why it was not taken
        embedding = read("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.embedding = Embedding(embedding)
        self.layers = [_layer(spec, index, read, linear) for index in range(spec.num_layers)]
        self.norm = RMSNorm(read("model.norm.weight", spec.hidden_size), spec.norm_eps)
        head = embedding if spec.tied else read("lm_head.weight", spec.vocab_size, spec.hidden_size)
        self.head = linear(head, None)

    @property
    def numerics(self) -> tuple[str, ...]:
        """What the bits of KV hang on besides weights and dtypes: kernels, instruction set, rope factors."""
        capability = torch.backends.cpu.get_cpu_capability().lower()
        return (self.attention.name, self.head.name, capability, *self.rope.variant)

    def kv_group(self, form: str, block_size: int) -> KVGroup:
        """How this model's KV lies in a pool; `form` is a key of kvtransfer.layout.ELEMENT_BITS."""
        return self.spec.kv_group(form, block_size)

    def forward(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Write the KV of all tokens and return logits fp32 [R, vocab_size] of batch.logit_rows.

        `on_layer(layer)` is called when the KV of that layer is written, for all tokens of the step.
        """
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
        return self.head(self.norm(x[batch.logit_rows])).float()

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


def _layer(spec: ModelSpec, index: int, read: Read, linear: Linear) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, size = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def weight(names: tuple[str, ...], sizes: tuple[int, ...], in_size: int) -> Tensor:
        """Weights of projections that share their input, one above the other."""
        parts = [read(f"{prefix}{name}.weight", out, in_size) for name, out in zip(names, sizes, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bias(wanted: bool, names: tuple[str, ...], sizes: tuple[int, ...]) -> Tensor | None:
        if not wanted:
            return None
        return torch.cat([read(f"{prefix}{name}.bias", out) for name, out in zip(names, sizes, strict=True)])

    def norm(name: str, length: int) -> RMSNorm:
        return RMSNorm(read(f"{prefix}{name}.weight", length), spec.norm_eps)

    qkv, qkv_sizes = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q_size, kv_size, kv_size)
    gate_up, down, output = ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",), ("self_attn.o_proj",)
    padding = -size % VECTOR_STRIDE
    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(weight(qkv, qkv_sizes, hidden), bias(spec.qkv_bias, qkv, qkv_sizes)),
        q_norm=norm("self_attn.q_norm", spec.head_dim) if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm", spec.head_dim) if spec.qk_norm else None,
        output=linear(weight(output, (hidden,), q_size), bias(spec.output_bias, output, (hidden,))),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear(
            _pad_halves(weight(gate_up, (size, size), hidden), padding),
            _pad_halves(bias(spec.mlp_bias, gate_up, (size, size)), padding),
        ),
        down=linear(F.pad(weight(down, (hidden,), size), (0, padding)), bias(spec.mlp_bias, down, (hidden,))),
    )


def _pad_halves(x: Tensor | None, padding: int) -> Tensor | None:
    """Zero rows behind the gates and behind the ups, so that swiglu's rows have the length it needs."""
    if x is None or padding == 0:
        return x
    gate, up = x.chunk(2)
    zeros = x.new_zeros(padding, *x.shape[1:])
    return torch.cat((gate, zeros, up, zeros))
