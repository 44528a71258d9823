"""Count what requests waited for, and how many of their proposals were right."""

import time

from baton.engine.core.request import Waits


class DraftCounts:
    """Count proposed and accepted tokens by position behind the last token, of one request or of all."""

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
    """Count the seconds in which the first sequence that waits had no room, and so those behind it. What one has waited
    for is what was added meanwhile."""

    SLOT, BLOCKS = Waits._fields

    def __init__(self) -> None:
        self._seconds, self._lack, self._at = Waits(), "", 0.0

    def look(self) -> None:
        """A step is chosen: what there was no room for until now is tried again."""
        self._seconds, self._lack, self._at = self.seconds, "", time.monotonic()

    def note(self, lack: str) -> None:
        """A sequence lacks SLOT or BLOCKS; what the first one lacks counts until the next step is chosen."""
        self._lack = self._lack or lack

    @property
    def seconds(self) -> Waits:
        """Return them, since the engine was made."""
        if not self._lack:
            return self._seconds
        lacked_s = getattr(self._seconds, self._lack) + time.monotonic() - self._at
        return self._seconds._replace(**{self._lack: lacked_s})
