"""The state blocks of a pool: what the layers of a state group keep of one sequence, or kept of one at the end of a span.
Which is whose is the ledger's business."""

import torch
from torch import Tensor

from baton.protocol import MAX_DRAFT_TOKENS
from kvtransfer.layout import KVGroup


class StatePool:
    """Blocks [0, num_states), fp32 [layers, elements] each; the first one is the last in memory."""

    def __init__(self, group: KVGroup, memory: Tensor):
        """memory: uint8 [num_states * bytes of a block]."""
        self.group = group
        size = group.num_kv_heads * group.head_dim
        self._blocks = memory.view(torch.float32).view(-1, group.num_layers, size)
        self._drafts = torch.empty(0)

    def __len__(self) -> int:
        return len(self._blocks)

    def of(self, state_id: int) -> Tensor:
        """Return a block, fp32 [layers, elements]."""
        return self._blocks[len(self) - 1 - state_id]

    def copy(self, source: int, target: int) -> None:
        """Copy all layers of one block: a checkpoint taken, or gone on from."""
        self.of(target).copy_(self.of(source))

    def drafts_of(self, state_id: int, num_elements: int) -> Tensor:
        """Return the inputs of the proposals that a sequence's last step computed, fp32 [layers, MAX_DRAFT_TOKENS,
        num_elements]: the next step folds those that were right. Pages that nobody proposes in are never touched."""
        if not len(self._drafts):
            self._drafts = torch.zeros(len(self), self.group.num_layers, MAX_DRAFT_TOKENS, num_elements)
        return self._drafts[state_id]
