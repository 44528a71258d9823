"""The live groups of one engine, by key, and when they are due."""

import heapq

from baton.engine.core.request import Key
from baton.engine.schedule.sequence import Group

_NUM_SPARE = 64  # deadlines kept of keys that have ended, and as many again as there are live ones


class Groups(dict[Key, Group]):
    """Guarded by the ledger's lock: code that looks a group up acts on it under the same lock, unless it is the
    loop's, which only the loop ends."""

    def __init__(self) -> None:
        super().__init__()
        self._deadlines: list[tuple[float, int, Key]] = []  # a heap; with the arrival: a key may come again

    def find(self, key: Key, arrival: int) -> Group | None:
        """The group that came with this arrival, unless it has ended."""
        group = self.get(key)
        return group if group is not None and group.arrival == arrival else None

    def expect(self, group: Group) -> None:
        """Check its deadline again: it may have changed."""
        if group.deadline == float("inf"):
            return
        heapq.heappush(self._deadlines, (group.deadline, group.arrival, group.key))
        if len(self._deadlines) > 2 * (len(self) + _NUM_SPARE):
            self._deadlines = [entry for entry in self._deadlines if self.find(entry[2], entry[1])]
            heapq.heapify(self._deadlines)

    def is_due(self, now: float) -> bool:
        """Return whether a deadline has passed, perhaps that of a key which has ended."""
        return bool(self._deadlines) and self._deadlines[0][0] <= now

    def pop_expired(self, now: float) -> Group | None:
        """Return a group whose deadline has passed, each once."""
        while self.is_due(now):
            _, arrival, key = heapq.heappop(self._deadlines)
            group = self.find(key, arrival)
            if group and group.deadline <= now:
                return group
        return None
