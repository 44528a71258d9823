"""What an attention backend is: it reads KV out of the pool for the queries of one step.

Exact backends reduce over KV in fixed spans of absolute positions and read what was stored, the step's own chunk
included; a query row is computed in one order, whatever rows and sequences share the step.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.engine.batch import ForwardBatch
from baton.engine.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one model as attention sees them. `windows`: per layer, positions a token sees, itself included."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    dtype: torch.dtype

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


class Attention(ABC):
    """A backend, made once per model."""

    name: str
    batch_invariant: bool

    def __init__(self, shape: AttentionShape):
        self.shape = shape

    @abstractmethod
    def plan(self, batch: ForwardBatch, pool: KVPool) -> Any:
        """What all layers of this step share: block tables, masks."""

    @abstractmethod
    def __call__(self, plan: Any, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend with q [T, num_heads, head_dim] (rotated) into out [T, num_heads, head_dim].

        The step's own K and V are already in the pool.
        """


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """bool [queries, keys]: a token sees itself and what came before, at most `window` positions in all."""
    distance = query_positions.unsqueeze(1) - key_positions
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
