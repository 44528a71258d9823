"""How those who share one thing get equal parts of it: whose turn it is, and who has room where all is taken."""

import math
from collections.abc import Container, Hashable, Iterable
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)


def has_room(most: float, taken: float, own: float, more: float, num_sharing: int) -> bool:
    """Whether one who has `own` of what is `taken` may have `more` of it: as long as there is some, and up to its part of
    `most` also where others have taken everything. `num_sharing`: how many have any of it, and the one who asks."""
    return taken + more <= most or (own + more) * num_sharing <= most


class RoundRobin(Generic[Who]):
    """Turns by deficit round robin (Shreedhar and Varghese, Efficient Fair Queueing Using Deficit Round Robin, SIGCOMM
    1995): whose turn comes may use a quantum more, and it ends when that is used. What one costs need not be known
    before: who has used more than it had waits for more turns (Adiseshu, Parulkar and Varghese, SIGCOMM 1996). Nobody
    waits for more than one turn of each of the others, whatever they have waiting."""

    def __init__(self, quantum: float):
        self._quantum = quantum
        self._left: dict[Who, float] = {}  # of those that wait, in order of their turns; the first has its turn

    def wait(self, waiting: Iterable[Who]) -> None:
        """Who waits from now on: those that come have their turn after all others, those that are gone begin anew."""
        waiting = dict.fromkeys(waiting)
        for who in self._left.keys() - waiting.keys():
            del self._left[who]
        for who in waiting:
            self._left.setdefault(who, 0.0)

    def next(self, among: Container[Who]) -> Who | None:
        """Whose turn it is of those that wait and are `among` them; the same until it is charged. None: nobody's."""
        ring = [who for who in self._left if who in among]
        if not ring:
            return None
        # Laps in which nobody would have anything left, at once.
        num_laps = max(0, math.floor(min(-self._left[who] for who in ring) / self._quantum))
        for who in ring:
            self._left[who] += num_laps * self._quantum
        while self._left[ring[0]] <= 0:
            ring.append(ring.pop(0))
            self._left[ring[-1]] = self._left.pop(ring[-1])
            self._left[ring[0]] += self._quantum
        return ring[0]

    def charge(self, who: Who, cost: float) -> None:
        """It has used so much. Nothing for one that does not wait."""
        if who in self._left:
            self._left[who] -= cost
