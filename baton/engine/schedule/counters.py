"""Count accepted proposals, the seconds for which requests waited, and how long outputs are."""

import time

from baton.engine.core.request import Request, Waits

FIRST_GUESS_TOKENS = 64  # expected before any was observed
AVERAGE_WEIGHT = 0.05  # of one more observed length


class DraftCounts:
    """Count proposed and accepted tokens by their position after the last token, for one request or for all."""

    __slots__ = ("num_drafts", "proposed", "accepted")

    def __init__(self):
        self.num_drafts = 0  # steps of one sequence with at least one proposal
        self.proposed: list[int] = []
        self.accepted: list[int] = []

    def add(self, num_proposed: int, num_accepted: int) -> None:
        self.num_drafts += 1
        if (missing := num_proposed - len(self.proposed)) > 0:
            self.proposed += [0] * missing
            self.accepted += [0] * missing
        for position in range(num_proposed):
            self.proposed[position] += 1
        for position in range(num_accepted):
            self.accepted[position] += 1


class WaitClock:
    """Count the seconds in which the first waiting sequence had no room, by what it lacked.

    A sequence's own wait is the difference of `seconds` between two times: all that wait behind the first wait for the
    same.
    """

    SLOT, BLOCKS = Waits._fields

    def __init__(self) -> None:
        self._seconds, self._lack, self._at = Waits(), "", 0.0

    def look(self) -> None:
        """Close the present interval: a step is being chosen, and waiting sequences are tried again."""
        self._seconds, self._lack, self._at = self.seconds, "", time.monotonic()

    def note(self, lack: str) -> None:
        """Note that a sequence lacks SLOT or BLOCKS. Only the first note after `look` counts, until the next step is
        chosen."""
        self._lack = self._lack or lack

    @property
    def seconds(self) -> Waits:
        """Return the seconds since the engine was made."""
        if not self._lack:
            return self._seconds
        lacked_s = getattr(self._seconds, self._lack) + time.monotonic() - self._at
        return self._seconds._replace(**{self._lack: lacked_s})


class OutputLengths:
    """A moving average over the lengths of finished outputs, from which blocks for growth are promised.

    Written by the loop, read by any thread.
    """

    def __init__(self):
        self._expected = float(FIRST_GUESS_TOKENS)

    def observe(self, num_output: int) -> None:
        """Add an output of `num_output` tokens."""
        self._expected += AVERAGE_WEIGHT * (num_output - self._expected)

    def expected_left(self, request: Request, num_output: int) -> int:
        """Return how many tokens are expected after the first `num_output`; at least one."""
        return max(1, min(request.max_tokens - num_output, round(self._expected)))
