"""Share one resource equally: take turns, and keep room for those that hold less than their part."""

import math
from collections.abc import Collection, Container, Hashable
from typing import Generic, TypeVar

Tenant = TypeVar("Tenant", bound=Hashable)


def has_room(most: float, taken: float, own: float, more: float, num_sharing: int) -> bool:
    """Return whether a tenant with `own` of what is `taken` may have `more`: as long as there is some, and up to its
    part of `most` also where others have taken everything. `num_sharing`: the tenants with any of it, this one
    included."""
    return taken + more <= most or (own + more) * num_sharing <= most


class RoundRobin(Generic[Tenant]):
    """Turns by deficit round robin (Shreedhar and Varghese, Efficient Fair Queueing Using Deficit Round Robin, SIGCOMM
    1995): the tenant whose turn it is may use a quantum more, and its turn ends when that is used. A cost need not be
    known before: a tenant that used more than it had waits for more turns (Adiseshu, Parulkar and Varghese, SIGCOMM
    1996). A tenant that is away saves its part of what others use, up to a bound, and the one with the most saved comes
    first: one with few requests is served at once and in one piece, however much others have waiting."""

    def __init__(self, quantum: float, most_saved: float):
        self._quantum, self._most_saved = quantum, most_saved
        # Credits, in order of turns; the first has its turn. A tenant that is missing here has saved all it may.
        self._left: dict[Tenant, float] = {}
        self._waiting: set[Tenant] = set()

    def has_saved(self, tenant: Tenant) -> bool:
        """Return whether it has more than a turn."""
        return self._left.get(tenant, self._most_saved) > self._quantum

    def wait(self, waiting: Collection[Tenant]) -> None:
        """Set the tenants that wait from now on; all others are away. Without any, credits stay as they are: the gaps
        between the requests of one that sends all the time forgive it nothing."""
        self._waiting = set(waiting)
        for tenant in waiting:
            self._left.setdefault(tenant, self._most_saved)

    def next(self, among: Container[Tenant]) -> Tenant | None:
        """Return whose turn it is of those that wait and are `among` them, the same until it is charged; None without
        one. Those that are left out keep their turns, and the others what they owe."""
        ring = [tenant for tenant in self._left if tenant in self._waiting and tenant in among]
        if not ring:
            return None
        if self.has_saved(most := max(ring, key=self._left.__getitem__)):
            return most
        left = dict(self._left)
        # Laps in which none would have anything left, at once.
        num_laps = max(0, math.floor(min(-left[tenant] for tenant in ring) / self._quantum))
        for tenant in ring:
            left[tenant] += num_laps * self._quantum
        while left[ring[0]] <= 0:
            ring.append(ring.pop(0))
            left[ring[-1]] = left.pop(ring[-1])
            if left[ring[0]] <= 0:
                left[ring[0]] += self._quantum
        if len(ring) == len(self._waiting):
            self._left = left
        return ring[0]

    def charge(self, tenant: Tenant, cost: float) -> None:
        """Charge `cost` to a tenant, and credit those that are away with the part of it that each who waits would have
        had. Does nothing for one that does not wait."""
        if tenant not in self._waiting:
            return
        # It owes more only where others could not use their turns, and these save no more than one that is away.
        self._left[tenant] = max(self._left[tenant], -self._most_saved) - cost
        for away in self._left.keys() - self._waiting:
            self._left[away] += cost / len(self._waiting)
            if self._left[away] >= self._most_saved:
                del self._left[away]
