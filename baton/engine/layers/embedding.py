"""Token embedding, and the output head, which may be the same matrix."""

import torch.nn.functional as F
from torch import Tensor


class Embedding:
    """Rows of a table by token id."""

    def __init__(self, weight: Tensor):
        self.weight = weight  # [vocab_size, hidden_size]

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]."""
        return F.embedding(token_ids, self.weight)
