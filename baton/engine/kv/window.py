"""Tell which blocks of a sequence later tokens still attend to, when layers have a sliding window.

    tokens   |------ skipped ------|---- window ----| next
    blocks   |   released    | unit  |  held ...    | taken for the next chunk or token

A block holds the KV of all layers. If every layer has a window, the largest one counts, and a block outside it (a
skipped block) is released. If some layers attend to all positions, a skipped block stays, and only the part of the
layers with a window is released (window_parts.py).
"""

from dataclasses import dataclass

from kvtransfer.naming import SPAN_TOKENS


@dataclass(frozen=True, slots=True)
class Window:
    """The sliding window of a model's layers. By default there is none: tokens attend to all that came before."""

    num_positions: int | None = None  # that a token attends to at most, itself included; None: all
    block_size: int = 1
    max_step_tokens: int = 0  # of one sequence
    block_bytes: int = 1
    part_bytes: int = 1  # of these, that are released outside the window

    @property
    def keeps_skipped(self) -> bool:
        """Whether some layers have no window, so that skipped blocks stay without a part of them."""
        return self.part_bytes < self.block_bytes

    @property
    def summary(self) -> str:
        """The window's words in the engine's start line."""
        if not self.keeps_skipped:
            return ""
        percent = 100 * self.part_bytes // self.block_bytes
        return f", {percent} % of each given back outside windows of {self.num_positions} tokens"

    def num_skipped_blocks(self, num_tokens: int) -> int:
        """Return how many leading blocks of a sequence of `num_tokens` tokens no later token attends to.

        That is never its last block. If skipped blocks stay, they are whole prefix-cache units.
        """
        if self.num_positions is None:
            return 0
        num_tokens_outside = max(0, num_tokens - max(1, self.num_positions - 1))
        # Kernels read whole spans and give positions outside no weight: in blocks that stay, all of a span must be
        # present.
        unit = max(SPAN_TOKENS, self.block_size) if self.keeps_skipped else self.block_size
        return num_tokens_outside // unit * unit // self.block_size

    def max_blocks(self, num_blocks: int, num_choices: int = 1) -> int:
        """Return how many whole blocks a request that fills `num_blocks` holds at most at a time.

        For each choice these are the window, two steps (blocks are released a step late) and a unit of the prefix
        cache; skipped blocks that stay count by what stays.
        """
        if self.num_positions is None:
            return num_blocks
        num_tokens = self.num_positions + 2 * self.max_step_tokens + max(SPAN_TOKENS, self.block_size)
        return self.in_whole_blocks(num_blocks, min(num_blocks, num_choices * (num_tokens // self.block_size + 2)))

    def in_whole_blocks(self, num_blocks: int, num_inside: int) -> int:
        """Return as how many whole blocks `num_blocks` count, of which `num_inside` are inside the window."""
        num_bytes = num_blocks * (self.block_bytes - self.part_bytes) + num_inside * self.part_bytes
        return -(-num_bytes // self.block_bytes)

    def held_of(self, block_ids: list[int], num_skipped: int) -> tuple[list[int], int]:
        """Return which of a sequence's blocks it holds when `num_skipped` leading ones are skipped.

        Also returns how many of these, leading ones, it holds without the part that layers with a window have.
        """
        return (block_ids, num_skipped) if self.keeps_skipped else (block_ids[num_skipped:], 0)


ALL = Window()
