"""Token embedding, and the output head, which may be the same matrix."""

import torch.nn.functional as F
from torch import Tensor

from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.layers.linear.panels import Panels


class Embedding:
    """Look up rows of a table by token id."""

    def __init__(self, weight: Tensor):
        self.weight = weight  # [vocab_size, hidden_size]

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows of int64 [T] -> [T, hidden_size]."""
        return F.embedding(token_ids, self.weight)


class PackedEmbedding:
    """Look up rows in an output head that a kernel has packed, so that the table is held once."""

    def __init__(self, panels: Panels):
        self._panels = panels

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows of int64 [T] -> [T, hidden_size]."""
        return self._panels.rows(token_ids)


def tied(embedding, head: LinearKernel):
    """Return the lookup for a `head` made of the table of `embedding`: whichever of the two needs no copy."""
    if isinstance(embedding, Embedding) and isinstance(head, PackedLinear) and head.panels.is_dense:
        return PackedEmbedding(head.panels)
    return embedding
