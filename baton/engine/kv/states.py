"""The state blocks of a pool: what the layers of a state group keep of one sequence, or kept of one at the end of a
span. Which is whose is the ledger's business."""

import torch
from torch import Tensor

from baton.protocol import MAX_DRAFT_TOKENS
from kvtransfer.layout import KVGroup


class StatePool:
    """Blocks [0, num_states), fp32 [layers, elements] each; the first one is the last in memory, and so in `blocks`."""

    def __init__(self, group: KVGroup, memory: Tensor):
        """memory: uint8 [num_states * bytes of a block]."""
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
        """Copy all layers of one block: a checkpoint taken, or gone on from."""
        self.of(target).copy_(self.of(source))

    def drafts_of(self, state_id: int, num_elements: int) -> Tensor:
        """Return the inputs of the proposals that a sequence's last step computed, fp32 [layers, MAX_DRAFT_TOKENS,
        num_elements]: the next step folds those that were right. Pages that nobody proposes in are never touched."""
        return self.hold_drafts(num_elements)[len(self) - 1 - state_id]

    def hold_drafts(self, num_elements: int) -> Tensor:
        """Make room for the inputs of proposals, the first block's last, as of the states."""
        if self.drafts is None:
            size = len(self), self.group.num_layers, MAX_DRAFT_TOKENS, num_elements
            self.drafts = torch.zeros(size, device=self.blocks.device)
        return self.drafts

    @staticmethod
    def draft_bytes(group: KVGroup, num_elements: int) -> int:
        """Return the bytes of such room for one block."""
        return 4 * group.num_layers * MAX_DRAFT_TOKENS * num_elements
