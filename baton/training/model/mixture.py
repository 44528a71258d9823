"""A small mixture of experts in plain PyTorch, its parameters named as in Qwen3-MoE checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.training.model.llama import MLP, CausalAttention, DecoderLayer, Fp32RMSNorm, Llama, ModelConfig
from baton.training.model.trainer import Loss, autocast

_BALANCE = 0.01  # of the balance in the loss: enough that no expert starves, little compared with 2 nats per token


@dataclass(frozen=True)
class MixtureConfig(ModelConfig):
    """The shape of a Llama whose MLPs are experts, `intermediate_size` wide, and whose q and k are normed per head."""

    num_experts: int = 8
    num_chosen: int = 2  # experts per token


class ExpertLayers(nn.Module):
    """A router that chooses experts for each row; their outputs are added, weighted by the router's scores."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_chosen
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(config) for _ in range(config.num_experts))
        # Of the last pass: 1 if all experts are equally busy, their number at worst.
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts, x and result [batch, length, hidden_size]."""
        rows = x.flatten(0, 1)
        scores = self.gate(rows).float().softmax(-1)
        weights, chosen = scores.topk(self.num_chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            of, slot = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, of, (expert(rows[of]) * weights[of, slot, None]).to(out.dtype))
        shares = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        self.balance = len(self.experts) * (shares * scores.mean(0)).sum()
        return out.view_as(x)


class Mixture(Llama):
    """The language model; its output matrix is the embedding."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer) and isinstance(layer.self_attn, CausalAttention)
            layer.self_attn.q_norm = Fp32RMSNorm(config.head_dim, config.norm_eps)
            layer.self_attn.k_norm = Fp32RMSNorm(config.head_dim, config.norm_eps)
            layer.mlp = experts = ExpertLayers(config)
            experts.apply(self._initialize)
            for expert in experts.experts:
                assert isinstance(expert, MLP)
                nn.init.zeros_(expert.down_proj.weight)  # each layer starts as the identity

    @property
    def balance(self) -> Tensor:
        """The mean balance of the last pass over all layers."""
        return torch.stack([module.balance for module in self.modules() if isinstance(module, ExpertLayers)]).mean()


def mixture_loss(model: Mixture) -> Loss:
    """Return a loss, inputs and targets int64 [batch, length] -> scalar: cross entropy against the next token, plus a
    term that keeps experts equally busy."""

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast():
            logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) + _BALANCE * (model.balance - 1)

    return loss
