"""Bound what the gateway takes: requests at the same time, in all and by tenant, and what each tenant may use."""

from collections import Counter

from baton.fairness import has_room
from baton.service.clock import now
from baton.service.errors import Overloaded
from gateway.queue.quotas import Quotas, Reservation

_RETRY_AFTER_S = 0.5


class AdmissionControl:
    """Count the requests in the gateway by tenant and keep their key ids, those of calls that no worker sees
    included."""

    def __init__(self, max_concurrent_requests: int, quotas: Quotas | None = None):
        self._max = max_concurrent_requests
        self.quotas = quotas or Quotas({})
        self.key_ids: dict[str, str] = {}  # with the tenant of each
        self._num = Counter[str]()  # by tenant

    def enter(self, key_id: str, tenant: str, num_choices: int = 1, model: str = "") -> Reservation:
        """Admit a request for a model and return its reservation of the tenant's quotas. The caller has checked that
        `key_id` is free, and calls `leave` when the request ends. Raises Overloaded, InvalidRequest."""
        own = self._num[tenant]
        if not has_room(
            most=self._max, taken=len(self.key_ids), own=own, more=1, num_sharing=len(self._num) + (not own)
        ):
            message = f"{len(self.key_ids)} requests are in the gateway already, {own} of them of this tenant"
            raise Overloaded(message, _RETRY_AFTER_S, reason="TOO_MANY_REQUESTS")
        reservation = self.quotas.enter(tenant, now(), num_choices, model)
        self.key_ids[key_id] = tenant
        self._num[tenant] += 1
        return reservation

    def leave(self, key_id: str, reservation: Reservation, num_used: int) -> None:
        """Remove a request that has used `num_used` tokens."""
        tenant = self.key_ids.pop(key_id)
        self._num[tenant] -= 1
        if not self._num[tenant]:
            del self._num[tenant]
        reservation.settle(num_used, now())
