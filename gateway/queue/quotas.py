"""Quotas of tenants, for all their requests and for those of one model: tokens a second, prompts and answers together,
and choices running at the same time. They hold for this gateway, or for all gateways that share their counts
(quota_sync.py)."""

import heapq
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.service.errors import InvalidRequest, Overloaded
from baton.service.file_stamp import file_stamp
from baton.service.logs import fields
from gateway.queue.quota_file import Quota, read_quotas, usage_name
from gateway.queue.token_bucket import TenantBucket, UsageCounts

OTHERS = "default"  # the table for tenants without one of their own
_RETRY_AFTER_S = 0.5
_LOOK_S = 1.0  # between two looks for a changed file and for idle tenants
MAX_COUNTED = 256  # tenants whose counts one gateway tells others

log = logging.getLogger(__name__)


class Reservation:
    """What one request reserves of its tenant's quotas, from its entry to its end."""

    __slots__ = ("_buckets", "_num_choices", "_num_tokens")

    def __init__(self, buckets: Sequence[TenantBucket], num_choices: int):
        self._buckets, self._num_choices, self._num_tokens = buckets, num_choices, 0
        for bucket in buckets:
            bucket.num_running += num_choices

    def reserve(self, num_tokens: int, at: float) -> None:
        """Reserve the most tokens that the request can use, once that is known. Raises Overloaded if others have used
        up the quota meanwhile."""
        for bucket in self._buckets:
            bucket.check_balance(at)
        for bucket in self._buckets:
            bucket.take(num_tokens, at)
        self._num_tokens += num_tokens

    def cover(self, num_used: int, at: float) -> None:
        """Raise the reservation to `num_used` tokens, also beyond the quota: a request that has begun continues, and
        later ones wait for the balance."""
        if (num_missing := num_used - self._num_tokens) > 0:
            for bucket in self._buckets:
                bucket.take(num_missing, at)
            self._num_tokens = num_used

    def settle(self, num_used: int, at: float) -> None:
        """End the reservation at `num_used` tokens: the others are given back, or missing ones taken. Only the first
        call counts."""
        if self._num_choices:
            self.cover(num_used, at)
        for bucket in self._buckets:
            bucket.give_back(max(0, self._num_tokens - num_used), at)
            bucket.num_running -= self._num_choices
        self._num_choices = self._num_tokens = 0


class Quotas:
    """The quotas and the usage of all active tenants. Only callers with a credential get an entry, which is dropped
    when idle."""

    def __init__(self, table: Mapping[str, Quota], path: Path | None = None):
        """Keep the quotas of a table by usage name. `path`: its file, read again when it changes; a file that cannot be
        read changes nothing."""
        self._table, self._buckets = table, dict[str, TenantBucket]()
        self._num_counted = 0  # where counts of new tenants begin, so that those of returning ones never fall
        self._path, self._stamp, self._looked_at = path, path and file_stamp(path), 0.0
        self._counts: Mapping[str, Mapping[str, UsageCounts]] = {}

    @classmethod
    def read(cls, path: Path | None) -> "Quotas":
        """Return the quotas of a TOML file, which is read again when it changes. Raises ValueError, one line."""
        return cls(read_quotas(path), path)

    def quota(self, tenant: str, model: str = "") -> Quota:
        """Return the quota of a tenant, its own or the default, for all its requests or for those of `model`."""
        whose = tenant if tenant in self._table else OTHERS
        others = self._table.get(usage_name(whose, model), Quota())
        return self._table.get(usage_name(tenant, model), others)

    def max_concurrent(self, tenant: str, model: str = "") -> int | None:
        """Return how many choices a tenant may have running, in all or for `model`; None: any number."""
        bounds = (self.quota(tenant).concurrent_requests, self.quota(tenant, model).concurrent_requests)
        return min((bound for bound in bounds if bound is not None), default=None)

    def enter(self, tenant: str, at: float, num_choices: int = 1, model: str = "") -> Reservation:
        """Admit one more request for a model and return its reservation, to be settled when it ends. Raises Overloaded
        that names the quota, or InvalidRequest for more choices than the tenant may ever have."""
        if at - self._looked_at >= _LOOK_S:
            self._looked_at = at
            self._read_again()
            self._drop_idle(at)
        buckets = [self._bucket_for(tenant, at)]
        if model and self.quota(tenant, model).is_bounded:
            buckets.append(self._bucket_for(tenant, at, model))
        for bucket in buckets:
            most = bucket.quota.concurrent_requests
            if most is not None and num_choices > most:
                message = f"is {num_choices}, and concurrent_requests {bucket.whose}of this tenant is {most}"
                raise InvalidRequest("sampling.n", message)
            if most is not None and bucket.num_running + bucket.num_elsewhere + num_choices > most:
                message = f"the tenant has {most} choices {bucket.whose}running, its quota of concurrent_requests"
                raise Overloaded(message, _RETRY_AFTER_S, reason="TENANT_REQUESTS")
            bucket.check_balance(at)
        return Reservation(buckets, num_choices)

    # ---- with other gateways ----

    def counts(self, at: float) -> dict[str, UsageCounts]:
        """Return this gateway's counts by usage name, for bounded tenants that are not idle; of more than MAX_COUNTED,
        those with most choices."""
        bounded = [
            (tenant, bucket)
            for tenant, bucket in self._buckets.items()
            if bucket.quota.is_bounded and not bucket.is_idle(at)
        ]
        most = heapq.nlargest(MAX_COUNTED, bounded, key=lambda named: named[1].num_running)
        return {tenant: bucket.counts(at) for tenant, bucket in most}

    def note_others(self, counts: Mapping[str, Mapping[str, UsageCounts]], at: float) -> None:
        """Apply the latest counts of all other gateways, gateway -> usage name -> counts. What is missing uses nothing;
        the counts of tenants without a request here apply when one comes."""
        self._counts = counts
        for tenant, bucket in self._buckets.items():
            self._note(tenant, bucket, at)

    def _note(self, tenant: str, bucket: TenantBucket, at: float) -> None:
        reporting = {gateway: tenants[tenant] for gateway, tenants in self._counts.items() if tenant in tenants}
        bucket.keep(reporting, at)
        for gateway, counts in reporting.items():
            bucket.merge(gateway, counts, at)

    # ---- the table ----

    def _bucket_for(self, tenant: str, at: float, model: str = "") -> TenantBucket:
        quota, name = self.quota(tenant, model), usage_name(tenant, model)
        if (bucket := self._buckets.get(name)) is None:
            bucket = self._buckets[name] = TenantBucket(quota, at, self._num_counted, model)
            self._note(name, bucket, at)
        bucket.adopt(quota, at)
        return bucket

    def _drop_idle(self, at: float) -> None:
        for tenant in [tenant for tenant, bucket in self._buckets.items() if bucket.is_idle(at)]:
            self._num_counted = max(self._num_counted, self._buckets.pop(tenant).num_reserved)

    def _read_again(self) -> None:
        if self._path is None or (stamp := file_stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._table = read_quotas(self._path)
            log.info("quotas read again %s", fields(tenants=len(self._table)))
        except ValueError as error:
            log.error("quotas: the old ones stay in use %s", fields(error=error))
