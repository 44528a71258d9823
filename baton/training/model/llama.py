"""A Llama in plain PyTorch, its parameters named as in Hugging Face checkpoints, so that an export is a copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama with tied embeddings."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


class Fp32RMSNorm(nn.Module):
    """Scale the last dimension to a root mean square of one, computed in fp32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., hidden_size], normed."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Past:
    """Keys and values [batch, kv_heads, length, head_dim] one layer has seen."""

    def __init__(self) -> None:
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [batch, kv_heads, new, head_dim]; return all so far, [batch, kv_heads, length, head_dim]."""
        if self.length:
            k, v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        self.k, self.v, self.length = k, v, k.shape[2]
        return k, v


class CausalAttention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm: nn.Module = nn.Identity()  # a Llama has no such norm
        self.k_norm: nn.Module = nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past | None = None) -> Tensor:
        """Attend: x [batch, length, hidden_size], cos and sin [length, head_dim] -> [batch, length, hidden_size]."""
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        if past is not None:
            k, v = past.append(k, v)
        groups = q.shape[1] // k.shape[1]
        # Repeated by hand: on CPU `enable_gqa` would not use the fused kernel.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x)), x and result [batch, length, hidden_size]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP, each on a normed copy of the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Fp32RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = CausalAttention(config)
        self.post_attention_layernorm = Fp32RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp: nn.Module = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past | None = None) -> Tensor:
        """Return the residual stream after the layer: x [batch, length, hidden_size], cos and sin [length, head_dim] ->
        [batch, length, hidden_size]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = Fp32RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, token_ids: Tensor, cache: list[Past] | None = None) -> Tensor:
        """Return the normed hidden states [batch, length, hidden_size] of token ids [batch, length]. With a cache, the
        ids continue what it holds."""
        x = self.embed_tokens(token_ids)
        first = cache[0].length if cache else 0
        cos, sin = rotary_table(self.config, first, token_ids.shape[1], x.dtype)
        for layer, past in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            x = layer(x, cos, sin, past)
        return self.norm(x)


class Llama(nn.Module):
    """The language model; its output matrix is the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.apply(self._initialize)

    def forward(self, token_ids: Tensor, cache: list[Past] | None = None) -> Tensor:
        """Return the logits [batch, length, vocab_size] of token ids [batch, length].

        With a cache, the ids continue what it holds: a prompt into an empty cache, then one token at a time."""
        return F.linear(self.model(token_ids, cache), self.model.embed_tokens.weight)

    def new_cache(self) -> list[Past]:
        """Return an empty cache for one batch of sequences."""
        return [Past() for _ in self.model.layers]

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, DecoderLayer):  # each layer starts as the identity
            nn.init.zeros_(module.self_attn.o_proj.weight)
            if isinstance(module.mlp, MLP):
                nn.init.zeros_(module.mlp.down_proj.weight)


def rotary_table(config: ModelConfig, first: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, head_dim] of the positions from `first`, equal in both halves."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(torch.arange(first, first + length).float(), config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [batch, heads, length, head_dim] by position, first half against second half."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
