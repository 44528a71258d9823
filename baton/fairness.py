"""Share one resource equally: take turns, and keep room for tenants that hold less than their share."""

import math
from collections.abc import Collection, Container, Hashable
from typing import Generic, TypeVar

Tenant = TypeVar("Tenant", bound=Hashable)


def has_room(most: float, taken: float, own: float, more: float, num_sharing: int) -> bool:
    """Return whether a tenant that has `own` of the `taken` amount may have `more`: if it fits in `most`, or if the
    tenant stays within its equal share of `most`. `num_sharing`: the tenants that have any of it, this one included."""
    return taken + more <= most or (own + more) * num_sharing <= most


class RoundRobin(Generic[Tenant]):
    """Give turns by deficit round robin (Shreedhar and Varghese, Efficient Fair Queueing Using Deficit Round Robin,
    SIGCOMM 1995): each turn adds a quantum to a tenant's credit, and ends when the credit is used. Costs need not be
    known in advance: a tenant that used more than its credit waits for more turns (Adiseshu, Parulkar and Varghese,
    SIGCOMM 1996). A tenant that does not wait saves its share of what others use, up to a bound, and the tenant with
    the most saved comes first. So a tenant with few requests is served without delay and without interruption, however
    many requests of others wait."""

    def __init__(self, quantum: float, most_saved: float):
        self._quantum, self._most_saved = quantum, most_saved
        # Credits in the order of turns; the first tenant has its turn. A tenant that is missing has saved the maximum.
        self._left: dict[Tenant, float] = {}
        self._waiting: set[Tenant] = set()

    def has_saved(self, tenant: Tenant) -> bool:
        """Return whether the tenant has saved more than one turn's credit."""
        return self._left.get(tenant, self._most_saved) > self._quantum

    def wait(self, waiting: Collection[Tenant]) -> None:
        """Set the tenants that wait; all others are away. If none wait, credits stay as they are, so that a tenant that
        sends all the time does not lose its debt in the gaps between its requests."""
        self._waiting = set(waiting)
        for tenant in waiting:
            self._left.setdefault(tenant, self._most_saved)

    def next(self, among: Container[Tenant]) -> Tenant | None:
        """Return whose turn it is, of the tenants that wait and are in `among`, or None. The answer stays the same
        until that tenant is charged. Tenants that are left out keep their turns, and the others what they owe."""
        ring = [tenant for tenant in self._left if tenant in self._waiting and tenant in among]
        if not ring:
            return None
        if self.has_saved(most := max(ring, key=self._left.__getitem__)):
            return most
        left = dict(self._left)
        # Skip the laps in which no tenant would have credit left.
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
        """Charge `cost` to a tenant, and credit each tenant that is away with the share of it that each waiting tenant
        would have had. Do nothing for a tenant that does not wait."""
        if tenant not in self._waiting:
            return
        # A debt grows beyond the bound only if others could not use their turns, and these save no more than the bound.
        self._left[tenant] = max(self._left[tenant], -self._most_saved) - cost
        for away in self._left.keys() - self._waiting:
            self._left[away] += cost / len(self._waiting)
            if self._left[away] >= self._most_saved:
                del self._left[away]
