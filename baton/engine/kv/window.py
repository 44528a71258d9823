"""Which blocks of a sequence are still looked at, where layers see only so many positions.

    tokens   |------ outside ------|---- window ----| next
    blocks   |  given back   |  unit |  held ...    | taken for the next chunk or token

Layers share a block. Where all of them have a window, the farthest that any sees counts, and blocks go back whole.
Where some see all, blocks stay, and of those outside the part of the others goes back (window_parts.py).
"""

from dataclasses import dataclass

from kvtransfer.naming import SPAN_TOKENS


@dataclass(frozen=True, slots=True)
class Window:
    """By default tokens see all that came before."""

    num_positions: int | None = None  # that a token sees at most, itself included; None: all
    block_size: int = 1
    max_step_tokens: int = 0  # of a sequence, in one step
    block_bytes: int = 1
    part_bytes: int = 1  # of these, that go back outside

    @property
    def is_part(self) -> bool:
        """Return whether some layers see all."""
        return self.part_bytes < self.block_bytes

    @property
    def summary(self) -> str:
        """Return what the engine's start line says of it."""
        if not self.is_part:
            return ""
        percent = 100 * self.part_bytes // self.block_bytes
        return f", {percent} % of each given back outside windows of {self.num_positions} tokens"

    def num_outside(self, num_tokens: int) -> int:
        """Return how many leading blocks of a sequence of `num_tokens` tokens no later token attends to. Never its last
        block; whole prefix-cache units where blocks stay (`is_part`)."""
        if self.num_positions is None:
            return 0
        num_outside = max(0, num_tokens - max(1, self.num_positions - 1))
        # Kernels read whole spans, and give what is outside no weight: where blocks stay, that must be memory that is
        # there.
        unit = max(SPAN_TOKENS, self.block_size) if self.is_part else self.block_size
        return num_outside // unit * unit // self.block_size

    def most_blocks(self, num_blocks: int, num_choices: int = 1) -> int:
        """Return how many of `num_blocks` that a request is to fill are held together, in whole blocks: the window, two
        steps (blocks go back a step late) and a unit of the prefix cache, for each choice; of others what stays where
        `is_part`."""
        if self.num_positions is None:
            return num_blocks
        num_tokens = self.num_positions + 2 * self.max_step_tokens + max(SPAN_TOKENS, self.block_size)
        return self.in_blocks(num_blocks, min(num_blocks, num_choices * (num_tokens // self.block_size + 2)))

    def in_blocks(self, num_blocks: int, num_seen: int) -> int:
        """Return as how many whole blocks so many count, of which `num_seen` are not outside."""
        num_bytes = num_blocks * (self.block_bytes - self.part_bytes) + num_seen * self.part_bytes
        return -(-num_bytes // self.block_bytes)

    def split(self, block_ids: list[int], num_outside: int) -> tuple[list[int], int]:
        """Return those of a sequence's blocks that it holds, of which the first `num_outside` are outside, and of how
        many of these, the first, it holds no more than what stays."""
        return (block_ids, num_outside) if self.is_part else (block_ids[num_outside:], 0)


ALL = Window()
