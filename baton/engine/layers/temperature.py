"""Scale queries by their position (arXiv 2501.19399)."""

import math

import torch
from torch import Tensor

from baton.engine.core.model_spec import TemperatureSpec


class Temperature:
    """Hold the factor on queries for every position that can be served."""

    def __init__(self, spec: TemperatureSpec, max_model_len: int, device: torch.device):
        steps = range(max_model_len // spec.every + 1)
        # By the host's log1p, since vector and scalar code of torch's differ in the last bit.
        factors = [1.0 + spec.scale * math.log1p(step) for step in steps]
        self._every, self._factors = spec.every, torch.tensor(factors, dtype=torch.float32, device=device)

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the factors of positions, int64 [T] -> fp32 [T, 1, 1]."""
        return self._factors[(positions + 1) // self._every].view(-1, 1, 1)
