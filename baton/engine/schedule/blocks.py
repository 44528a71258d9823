"""The blocks that a sequence lacks, and those that it takes."""

from baton.engine.kv.ledger import Ledger
from baton.engine.schedule.sequence import Sequence
from baton.engine.schedule.tenant_shares import Amounts
from kvtransfer.layout import KVLayout


class SequenceBlocks:
    """Of the loop's sequences; the ledger guards itself."""

    def __init__(self, layout: KVLayout, ledger: Ledger):
        self.layout, self.ledger = layout, ledger

    def num_lacking(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many blocks more `num_tokens` of its tokens take than it has."""
        return self.layout.num_blocks(num_tokens) - len(seq.block_ids)

    def num_to_enter(self, seq: Sequence) -> int:
        """Return how many blocks a waiting sequence takes before it is read."""
        return self.ledger.window.most_blocks(self.num_lacking(seq, seq.num_tokens))

    def lacked(self, seq: Sequence) -> Amounts:
        """Return what a waiting sequence takes beyond its promise."""
        has_state = self.ledger.states is None or seq.recurrent.num_own > 0
        return Amounts(self.num_to_enter(seq) - seq.reserve, int(not has_state))

    def lacks_any(self, seq: Sequence) -> bool:
        return any(num > 0 for num in self.lacked(seq))

    def take(self, seq: Sequence, num: int) -> bool:
        """Take `num` more blocks for a sequence, from its promise first. False where there are too few."""
        reserved = min(num, seq.reserve)
        block_ids = self.ledger.allocate(num, seq.group.holder, reserved)
        if block_ids is None:
            return False
        seq.reserve -= reserved
        seq.block_ids += block_ids
        seq.block_table = None
        return True
