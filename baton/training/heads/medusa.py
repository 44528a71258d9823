"""Medusa-style heads in training: head i learns what the target would say i tokens after the newest one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.training.heads.target import FrozenTarget


class MedusaHeads(nn.Module):
    """One block per head over [features ; embedding of the newest token]
    (baton.engine.speculation.proposers.medusa)."""

    def __init__(self, hidden_size: int, num_heads: int, norm_eps: float, scale: float) -> None:
        """Initialize the heads. `scale` is the root mean square of the target's features."""
        super().__init__()
        self.norm_eps = norm_eps
        # The residual path is learned: the features say what comes next, which no head is asked for, so a fixed path
        # would have to be unlearned first (after 40 steps on the demo model, head 1 was right at 13 % of the places
        # instead of 28 %).
        self.skip = nn.ModuleList(nn.Linear(2 * hidden_size, hidden_size, bias=False) for _ in range(num_heads))
        self.enter = nn.ModuleList(nn.Linear(2 * hidden_size, hidden_size) for _ in range(num_heads))
        self.leave = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(num_heads))
        self.scales = nn.ParameterList(torch.full((hidden_size,), 0.5 * scale) for _ in range(num_heads))
        linears = cast("Iterator[tuple[nn.Linear, ...]]", zip(self.skip, self.enter, self.leave, strict=True))
        for skip, enter, leave in linears:
            nn.init.normal_(skip.weight, std=0.3 / hidden_size**0.5)
            nn.init.normal_(enter.weight, std=0.5 / hidden_size**0.5)
            nn.init.zeros_(enter.bias)
            nn.init.normal_(leave.weight, std=0.8 / hidden_size**0.5)

    def forward(self, features: Tensor, drawn: Tensor) -> Iterator[Tensor]:
        """Yield, head by head, the input of the output matrix for features and embeddings [..., hidden_size]."""
        both = torch.cat((self._norm(features), self._norm(drawn)), dim=-1)
        for skip, enter, leave, scale in zip(self.skip, self.enter, self.leave, self.scales, strict=True):
            yield scale * self._norm(skip(both) + leave(F.silu(enter(both))))

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.norm_eps)

    def guesses(self, target: FrozenTarget, features: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        """Yield the logits [batch, places, vocab_size] of each head: head i at place p is for the token after token p +
        i.

        `features` [batch, length, hidden_size] are the target's, at the first of `token_ids` [batch, length + 1]."""
        places = features.shape[1] - len(self.enter)
        drawn = target.embed(token_ids[:, 1 : places + 1])
        for output in self(features[:, :places], drawn):
            yield target.logits(output)

    @property
    def num_steps(self) -> int:
        return len(self.enter)
