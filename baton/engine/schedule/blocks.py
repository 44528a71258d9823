"""Count the blocks that a sequence lacks, and allocate them from the ledger."""

from baton.engine.kv.ledger import Ledger
from baton.engine.schedule.sequence import Sequence
from baton.engine.schedule.tenant_shares import Amounts
from kvtransfer.layout import KVLayout


class SequenceBlocks:
    """Allocate blocks for the loop's sequences. Belongs to the loop's thread; the ledger has its own lock."""

    def __init__(self, layout: KVLayout, ledger: Ledger):
        self.layout, self.ledger = layout, ledger

    def num_lacking(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many more blocks than it has a sequence needs for its first `num_tokens` tokens."""
        return self.layout.num_blocks(num_tokens) - len(seq.block_ids)

    def num_to_enter(self, seq: Sequence) -> int:
        """Return how many blocks a waiting sequence needs before it may run."""
        return self.ledger.window.most_blocks(self.num_lacking(seq, seq.num_tokens))

    def lacked(self, seq: Sequence) -> Amounts:
        """Return the blocks and states that a waiting sequence needs beyond its promise."""
        has_state = self.ledger.states is None or seq.recurrent.num_own > 0
        return Amounts(self.num_to_enter(seq) - seq.reserve, int(not has_state))

    def lacks_any(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence needs any block or state beyond its promise."""
        return any(num > 0 for num in self.lacked(seq))

    def take(self, seq: Sequence, num: int) -> bool:
        """Allocate `num` more blocks for a sequence, from its promise first. Returns False if too few are available."""
        reserved = min(num, seq.reserve)
        block_ids = self.ledger.allocate(num, seq.group.holder, reserved)
        if block_ids is None:
            return False
        seq.reserve -= reserved
        seq.block_ids += block_ids
        seq.block_table = None
        return True
