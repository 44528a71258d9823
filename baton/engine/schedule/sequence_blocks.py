"""Keep the blocks of one sequence: those that it holds, is promised, and has skipped since they left its window."""

from torch import Tensor

from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.kv.window import Window
from kvtransfer.layout import KVLayout


class SequenceBlocks:
    """The blocks of one sequence, in order of positions. Guarded as its sequence is.

        ids   |   skipped   | retiring |  inside the window  |      num_skipped counts retiring blocks too
                            |=========== held() ============|      all of `ids` if skipped blocks stay

    Blocks before the window of every later token are skipped. Those that were skipped by the last step are retiring:
    held until the next one, since a step launched meanwhile may still have them in its block table. Unless skipped
    blocks stay (`Window.keeps_skipped`), their places in `ids` repeat the first block inside the window.
    """

    __slots__ = ("ids", "num_skipped", "retiring_ids", "reserve", "table")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.num_skipped = 0
        self.retiring_ids: list[int] = []
        self.reserve = 0  # blocks that the ledger has promised to it and that it has not taken
        self.table: Tensor | None = None  # `ids` as a tensor, made by the runner; methods that change `ids` reset it

    @property
    def window_ids(self) -> list[int]:
        """The blocks inside the window, and the retiring ones."""
        return self.retiring_ids + self.ids[self.num_skipped :]

    def held(self, window: Window) -> tuple[list[int], int]:
        """Return the held blocks, and how many leading ones are held without the part of layers with a window."""
        if window.keeps_skipped:
            return self.ids, self.num_skipped - len(self.retiring_ids)
        return self.window_ids, 0

    def num_held(self, window: Window) -> int:
        """Return as how many whole blocks the held ones count."""
        return window.in_whole_blocks(len(self.ids), len(self.retiring_ids) + len(self.ids) - self.num_skipped)

    def num_lacking(self, num_tokens: int, layout: KVLayout) -> int:
        """Return how many more blocks the first `num_tokens` tokens need; negative if there are more than enough."""
        return layout.num_blocks(num_tokens) - len(self.ids)

    def allocate(self, num: int, ledger: Ledger, holder: Holder) -> bool:
        """Allocate `num` more blocks, from the promise first. Returns False if too few are available."""
        reserved = min(num, self.reserve)
        block_ids = ledger.allocate(num, holder, reserved)
        if block_ids is None:
            return False
        self.reserve -= reserved
        self.ids += block_ids
        self.table = None
        return True

    def begin(self, block_ids: list[int], num_skipped: int = 0) -> None:
        """Begin with blocks that the caller has allocated or shared, except for `num_skipped` leading ones."""
        self.ids, self.num_skipped, self.table = block_ids, num_skipped, None

    def cut(self, num_kept: int) -> list[int]:
        """Remove all blocks after the first `num_kept`, and return them for the caller to release."""
        removed, self.ids, self.table = self.ids[num_kept:], self.ids[:num_kept], None
        return removed

    def fill_skipped(self, num_skipped: int, window: Window) -> None:
        """Set the number of skipped blocks, and fill their places with the first block inside the window.

        Attention backends that gather all blocks before masking then read memory of the sequence itself. Blocks that
        stay keep their places.
        """
        self.num_skipped = num_skipped
        if not window.keeps_skipped:
            self.ids[:num_skipped] = self.ids[num_skipped : num_skipped + 1] * num_skipped
            self.table = None

    def begin_after_skipped(self, num_skipped: int, ledger: Ledger, holder: Holder) -> None:
        """Release all blocks and begin after `num_skipped` blocks, without holding these."""
        self.release(ledger, holder)
        self.begin([0] * num_skipped, num_skipped)

    def retire(self, num_skipped: int, ledger: Ledger, holder: Holder) -> None:
        """Release the retiring blocks; then retire those that `num_skipped` adds to the skipped ones, if any."""
        if self.retiring_ids:
            ledger.release_skipped(self.retiring_ids, holder)
            self.retiring_ids = []
        if num_skipped > self.num_skipped:
            self.retiring_ids = self.ids[self.num_skipped : num_skipped]
            self.fill_skipped(num_skipped, ledger.window)

    def extend(self, new_ids: list[int], num_skipped: int, ledger: Ledger, holder: Holder) -> None:
        """Append blocks that were shared, and release at once what `num_skipped` leaves outside the window."""
        outside = self.retiring_ids + self.ids[self.num_skipped : num_skipped]
        ledger.release_skipped(outside, holder)
        self.retiring_ids, self.ids, self.table = [], self.ids + new_ids, None
        self.fill_skipped(num_skipped, ledger.window)

    def release(self, ledger: Ledger, holder: Holder) -> None:
        """Release the held blocks; the fields stay as they are."""
        block_ids, num_partial = self.held(ledger.window)
        ledger.release(block_ids, holder, num_partial)

    def give_back(self, ledger: Ledger, holder: Holder) -> None:
        """Release the held blocks and the promise. Whole units stay in the cache."""
        self.release(ledger, holder)
        ledger.unreserve(self.reserve)
        self.ids, self.retiring_ids, self.num_skipped, self.reserve, self.table = [], [], 0, 0, None
