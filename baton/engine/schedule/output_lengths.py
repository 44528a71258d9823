"""Estimate how long outputs are, so that blocks for a sequence's growth can be reserved."""

from baton.engine.core.request import Request

FIRST_GUESS_TOKENS = 64  # expected before any was observed
AVERAGE_WEIGHT = 0.05  # of one more observed length


class OutputLengths:
    """A moving average over the lengths of finished outputs. Written by the loop, read by any thread."""

    def __init__(self):
        self._expected = float(FIRST_GUESS_TOKENS)

    def observe(self, num_output: int) -> None:
        """Add an output of `num_output` tokens."""
        self._expected += AVERAGE_WEIGHT * (num_output - self._expected)

    def expected_left(self, request: Request, num_output: int) -> int:
        """Return how many tokens are expected after the first `num_output`; at least one."""
        return max(1, min(request.max_tokens - num_output, round(self._expected)))
