"""Hold the state blocks of a pool: the recurrent state of a sequence, or a checkpoint of one at the end of a span."""

import torch
from torch import Tensor

from baton.protocol import MAX_DRAFT_TOKENS
from kvtransfer.layout import KVGroup


class StatePool:
    """State blocks [0, num_states), fp32 [layers, elements] each, in reverse order in memory and in `blocks`."""

    def __init__(self, group: KVGroup, memory: Tensor):
        """Take the memory of all blocks, uint8 [num_states * bytes of a block]."""
        self.group = group
        size = group.num_kv_heads * group.head_dim
        self.blocks = memory.view(torch.float32).view(-1, group.num_layers, size)
        self.drafts: Tensor | None = None  # fp32 [num_states, layers, MAX_DRAFT_TOKENS, elements]

    def __len__(self) -> int:
        return len(self.blocks)

    def of(self, state_id: int) -> Tensor:
        """Return a block, fp32 [layers, elements]."""
        return self.blocks[len(self) - 1 - state_id]

    def copy(self, source: int, target: int) -> None:
        """Copy all layers of one block to or from a checkpoint."""
        self.of(target).copy_(self.of(source))

    def drafts_of(self, state_id: int, num_elements: int) -> Tensor:
        """Return the inputs of the proposals in a sequence's last step, fp32 [layers, MAX_DRAFT_TOKENS, num_elements].

        The next step folds the accepted ones into the state. Without proposals the memory is never touched.
        """
        return self.hold_drafts(num_elements)[len(self) - 1 - state_id]

    def hold_drafts(self, num_elements: int) -> Tensor:
        """Allocate the inputs of proposals once, in the order of `blocks`, and return them."""
        if self.drafts is None:
            size = len(self), self.group.num_layers, MAX_DRAFT_TOKENS, num_elements
            self.drafts = torch.zeros(size, device=self.blocks.device)
        return self.drafts

    @staticmethod
    def draft_bytes(group: KVGroup, num_elements: int) -> int:
        """Return the bytes of the inputs of proposals for one state block."""
        return 4 * group.num_layers * MAX_DRAFT_TOKENS * num_elements
