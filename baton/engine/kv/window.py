"""Which blocks of a sequence are still looked at, where every layer sees only so many positions.

    tokens   |------ outside ------|---- window ----| next
    blocks   |  given back   |  unit |  held ...    | taken for the next chunk or token

Layers share a block, so the farthest that any of them sees counts: a model with one layer that sees all keeps all.
"""

from dataclasses import dataclass

from kvtransfer.naming import SPAN_TOKENS


@dataclass(frozen=True, slots=True)
class Window:
    """By default tokens see all that came before."""

    num_positions: int | None = None  # that a token sees at most, itself included; None: all
    block_size: int = 1
    max_step_tokens: int = 0  # of a sequence, in one step

    def num_outside(self, num_tokens: int) -> int:
        """Return how many of the first blocks, those of `num_tokens` tokens, none that comes behind these sees; the last of
        the blocks is never one of them."""
        if self.num_positions is None:
            return 0
        return max(0, num_tokens - max(1, self.num_positions - 1)) // self.block_size

    def most_blocks(self, num_blocks: int, num_choices: int = 1) -> int:
        """Return how many of `num_blocks` that sequences are to fill they hold at a time: window and chunk, the chunk before,
        whose blocks go back a step later, and a unit of the prefix cache, which is named as a whole."""
        if self.num_positions is None:
            return num_blocks
        num_tokens = self.num_positions + 2 * self.max_step_tokens + max(SPAN_TOKENS, self.block_size)
        return min(num_blocks, num_choices * (num_tokens // self.block_size + 2))


ALL = Window()
