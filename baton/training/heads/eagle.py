"""An EAGLE-style draft in training: its own output replaces hidden states that are not computed yet."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from baton.engine.core.model_spec import ModelSpec
from baton.engine.layers.rope import Rope
from baton.engine.speculation.proposers.feature_proposer import WINDOW
from baton.training.heads.target import FrozenTarget
from baton.training.model.llama import MLP, Fp32RMSNorm, ModelConfig

NUM_STEPS = 3  # of drafting on its own output, as it will when served ("training-time test", arXiv 2503.01840)
# mean number of rows between two cuts: a decode worker has hidden states only from its own first step on
MEAN_CONTEXT = 96


class EagleDraft(nn.Module):
    """One decoder layer over a projection of [embedding ; features] (baton.engine.speculation.proposers.eagle)."""

    def __init__(self, spec: ModelSpec, scale: float) -> None:
        """Initialize the draft. `scale` is the root mean square of the target's features."""
        super().__init__()
        size, head_dim = spec.hidden_size, spec.head_dim
        self.head_dim, self.num_groups = head_dim, spec.num_heads // spec.num_kv_heads
        self.intermediate_size = spec.intermediate_size
        self.embedding_norm = Fp32RMSNorm(size, spec.norm.eps)
        self.features_norm = Fp32RMSNorm(size, spec.norm.eps)
        self.project = nn.Linear(2 * size, size, bias=False)
        self.input_norm = Fp32RMSNorm(size, spec.norm.eps)
        self.q_proj = nn.Linear(size, spec.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(size, spec.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(size, spec.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * head_dim, size, bias=False)
        self.mlp_norm = Fp32RMSNorm(size, spec.norm.eps)
        self.mlp = MLP(ModelConfig(spec.vocab_size, size, spec.intermediate_size, 1, spec.num_heads, 1, head_dim))
        self.norm = Fp32RMSNorm(size, spec.norm.eps)
        for matrix in self.parameters():
            if matrix.ndim == 2:
                nn.init.normal_(matrix, std=0.02)
        # Initially the layer is the identity, and the projection returns the features.
        nn.init.zeros_(self.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)
        with torch.no_grad():
            self.project.weight[:, size:] += torch.eye(size)
            self.norm.weight.fill_(scale)

    def guesses(self, target: FrozenTarget, features: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        """Yield the logits [batch, places, vocab_size] of each drafted token: the i-th at place p is for the token
        after token p + i.

        `features` [batch, length, hidden_size] are the target's, at the first of `token_ids` [batch, length + 1]."""
        places = features.shape[1] - NUM_STEPS
        seen = _seen(token_ids[:, :places])
        past: list[tuple[Tensor, Tensor]] = []
        newest = features[:, :places]
        for step in range(NUM_STEPS):
            embedded = target.embed(token_ids[:, step + 1 : step + 1 + places])
            tables = target.model.ropes[0].tables(torch.arange(step, step + places), torch.float32)
            newest = self._step(embedded, newest, (target.model.ropes[0], *tables), past, seen)
            yield target.logits(newest)

    def _step(
        self,
        embedded: Tensor,
        features: Tensor,
        rotation: tuple[Rope, Tensor, Tensor],
        past: list[tuple[Tensor, Tensor]],
        seen: Tensor,
    ) -> Tensor:
        """Draft one token at all places in parallel; return [batch, places, hidden_size].

        A row of a later step sees the rows of the first step up to its own place, which had true features, and of later
        steps only its own place."""
        both = torch.cat((self.embedding_norm(embedded.float()), self.features_norm(features.float())), dim=-1)
        x = self.project(both).float()
        y = self.input_norm(x)
        rope, cos, sin = rotation
        q, k, v = (
            projection(y).float().unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (part.repeat_interleave(self.num_groups, dim=2) for part in (rope(k, cos, sin), v))
        q, k, v = (part.transpose(1, 2) for part in (rope(q, cos, sin), k, v))
        past.append((k, v))
        (first_k, first_v), *own = past
        scores = [(q @ first_k.transpose(2, 3)).masked_fill(~seen, float("-inf"))]
        scores += [(q * own_k).sum(-1, keepdim=True) for own_k, _ in own]
        weights = (torch.cat(scores, dim=-1) * self.head_dim**-0.5).softmax(-1)
        mixed = weights[..., : first_k.shape[2]] @ first_v
        for index, (_, own_v) in enumerate(own):
            mixed = mixed + weights[..., first_k.shape[2] + index, None] * own_v
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return self.norm(x + self.mlp(self.mlp_norm(x)))

    @property
    def num_steps(self) -> int:
        return NUM_STEPS


def _seen(token_ids: Tensor) -> Tensor:
    """Return a mask bool [batch, 1, places, places] of the rows that a row sees, with random cuts of the context.

    The cuts are a function of the text, so a resumed run draws the same ones."""
    generator = torch.Generator().manual_seed(int(token_ids.sum()))
    segments = (torch.rand(token_ids.shape, generator=generator) < 1 / MEAN_CONTEXT).cumsum(1)
    distance = torch.arange(token_ids.shape[1])
    distance = distance.unsqueeze(1) - distance
    near = (distance >= 0) & (distance < WINDOW)
    return (near & (segments.unsqueeze(2) == segments.unsqueeze(1))).unsqueeze(1)
