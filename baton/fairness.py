"""Share one resource equally: take turns, and keep room for those that hold less than their part."""

import math
from collections.abc import Collection, Container, Hashable
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)


def has_room(most: float, taken: float, own: float, more: float, num_sharing: int) -> bool:
    """Return whether one who has `own` of what is `taken` may have `more` of it: as long as there is some, and up to
    its part of `most` also where others have taken everything. `num_sharing`: how many have any of it, and the one who
    asks."""
    return taken + more <= most or (own + more) * num_sharing <= most


class RoundRobin(Generic[Who]):
    """Turns by deficit round robin (Shreedhar and Varghese, Efficient Fair Queueing Using Deficit Round Robin, SIGCOMM
    1995): whose turn comes may use a quantum more, and it ends when that is used. What one costs need not be known
    before: who has used more than it had waits for more turns (Adiseshu, Parulkar and Varghese, SIGCOMM 1996). Who is
    away saves what its turns would have given it, up to a bound, and who has saved most goes first: one who seldom comes
    is served at once and in one piece, whatever others have waiting."""

    def __init__(self, quantum: float, most_saved: float):
        self._quantum, self._most_saved = quantum, most_saved
        # What each has left, in order of their turns; the first has its turn. Who is not here has saved all it may.
        self._left: dict[Who, float] = {}
        self._waiting: set[Who] = set()

    def has_saved(self, who: Who) -> bool:
        """Return whether it has more than a turn."""
        return self._left.get(who, self._most_saved) > self._quantum

    def wait(self, waiting: Collection[Who]) -> None:
        """Set who waits from now on; all others are away. Where none waits there is enough for all, and counts restart."""
        self._waiting = set(waiting)
        if not self._waiting:
            self._left.clear()
        for who in waiting:
            self._left.setdefault(who, self._most_saved)

    def next(self, among: Container[Who]) -> Who | None:
        """Return whose turn it is of those that wait and are `among` them, the same until it is charged; None without one."""
        ring = [who for who in self._left if who in self._waiting and who in among]
        if not ring:
            return None
        if self.has_saved(most := max(ring, key=self._left.__getitem__)):
            return most
        # Laps in which none would have anything left, at once.
        num_laps = max(0, math.floor(min(-self._left[who] for who in ring) / self._quantum))
        for who in ring:
            self._left[who] += num_laps * self._quantum
        num_given = num_laps
        while self._left[ring[0]] <= 0:
            ring.append(ring.pop(0))
            self._left[ring[-1]] = self._left.pop(ring[-1])
            if self._left[ring[0]] <= 0:
                self._left[ring[0]] += self._quantum
                num_given += 1 / len(ring)
        self._save(num_given * self._quantum)
        return ring[0]

    def charge(self, who: Who, cost: float) -> None:
        """Charge what it has used. Does nothing for one that does not wait."""
        if who in self._waiting:
            self._left[who] -= cost

    def _save(self, given: float) -> None:
        """Those who are away, as much as each of those who are not was given."""
        if given:
            for who in self._left.keys() - self._waiting:
                self._left[who] += given
                if self._left[who] >= self._most_saved:
                    del self._left[who]
