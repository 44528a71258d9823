"""Quotas of tenants, for all their requests and for those of one model: tokens a second, prompts and answers together,
and choices running at the same time. They hold for this gateway, or for all gateways that share their counts
(quota_sync.py)."""

import hashlib
import heapq
import logging
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from baton import protocol
from baton.service.errors import InvalidRequest, Overloaded
from baton.service.file_stamp import file_stamp
from baton.service.logs import fields

OTHERS = "default"  # the table for tenants without one of their own
_BURST_S = 10.0  # of the rate, if the file gives no burst
_RETRY_AFTER_S = 0.5
_FIELDS = ("tokens_per_s", "burst_tokens", "concurrent_requests", "max_priority")
_OF_A_MODEL = ("tokens_per_s", "burst_tokens", "concurrent_requests")
_INTEGERS = ("concurrent_requests", "max_priority")
_LOOK_S = 1.0  # between two looks for a changed file and for idle tenants
MAX_COUNTED = 256  # tenants whose counts one gateway tells others

log = logging.getLogger(__name__)


class Quota(NamedTuple):
    """The bounds of a tenant; None: no bound. A request counts once for each of its choices. Priorities above
    `max_priority` are lowered to it."""

    tokens_per_s: float | None = None
    burst_tokens: float = 0.0
    concurrent_requests: int | None = None
    max_priority: int = 0

    @property
    def is_bounded(self) -> bool:
        """Whether tokens or choices are bounded."""
        return self.tokens_per_s is not None or self.concurrent_requests is not None


def read_quotas(path: Path | None) -> Mapping[str, Quota]:
    """Return the quotas in a TOML file by usage name. It has a table for each tenant, and `default` for all others:

        [default]
        tokens_per_s = 20000
        burst_tokens = 100000       # 10 s of the rate when it is left out
        concurrent_requests = 32    # a request with n = 8 counts as 8
        max_priority = 5            # 0 when it is left out

        [default.models.chat]       # for requests of one model
        tokens_per_s = 5000

    A tenant that has only tables for models keeps the default's bounds for all its requests. Raises ValueError, one
    line."""
    if path is None:
        return {}
    try:
        tables = tomllib.loads(path.read_text())
        found = {}
        for name, table in tables.items():
            models = table.pop("models", {}) if isinstance(table, dict) else {}
            if not isinstance(models, dict):
                raise ValueError(f"[{name}] models is not a table: write [{name}.models.NAME] and its lines")
            if table or not models:  # else there is no [name] in the file, only [name.models.*]
                found[name] = _quota(name, table, _FIELDS)
            for model, own in models.items():
                found[usage_name(name, model)] = _quota(f"{name}.models.{model}", own, _OF_A_MODEL)
        return found
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def usage_name(tenant: str, model: str) -> str:
    """Return the name under which a tenant's usage is counted, of all its requests or of those for `model`. It is at
    most 17 characters longer than the tenant's, however long the model's name is."""
    return f"{tenant}@{hashlib.sha256(model.encode()).hexdigest()[:16]}" if model else tenant


def _quota(name: str, table: object, known: Sequence[str]) -> Quota:
    if not isinstance(table, dict):
        raise ValueError(f"{name} is not a table: write [{name}] and a line for each of {', '.join(known)}")
    for field, value in table.items():
        if field not in known:
            raise ValueError(f"[{name}] {field} is not one of {', '.join(known)}")
        kinds = int if field in _INTEGERS else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e12:
            raise ValueError(f"[{name}] {field} = {value!r}: a number over 0 is needed")
    rate = table.get("tokens_per_s")
    if rate is None and "burst_tokens" in table:
        raise ValueError(f"[{name}] burst_tokens has no effect without tokens_per_s")
    burst_tokens = table.get("burst_tokens", _BURST_S * (rate or 0))
    return Quota(rate, burst_tokens, table.get("concurrent_requests"), table.get("max_priority", 0))


class UsageCounts(NamedTuple):
    """One gateway's counts for one usage name. `num_running` counts choices; reserved and returned tokens only rise."""

    num_running: int
    num_reserved: int
    num_returned: int
    balance: float


class Usage:
    """The remaining quota of one tenant, in all or for one model: a token bucket that fills at its rate.

    A request takes the most that it can use and gives back what it did not use. The balance may fall below zero, by one
    request and by what answers of any length use beyond their reservation; then requests are refused until it has risen
    again."""

    __slots__ = ("quota", "whose", "num_running", "num_reserved", "num_returned", "elsewhere", "_balance", "_at")

    def __init__(self, quota: Quota, at: float, num_counted: int = 0, model: str = ""):
        """Begin with a full bucket. `num_counted`: where the counts of tokens begin; `model`: empty for all
        requests."""
        self.quota, self.num_running = quota, 0
        self.whose = f"of {model} " if model else ""
        self.num_reserved = self.num_returned = num_counted
        # Gateway -> its latest counts, and how many of its tokens were taken from this bucket.
        self.elsewhere: dict[str, tuple[UsageCounts, int]] = {}
        self._balance, self._at = quota.burst_tokens, at

    @property
    def num_elsewhere(self) -> int:
        """The choices that run through other gateways."""
        return sum(counts.num_running for counts, _ in self.elsewhere.values())

    def is_idle(self, at: float) -> bool:
        """Return whether nothing runs and the bucket is full."""
        is_full = self.quota.tokens_per_s is None or self.balance(at) >= self.quota.burst_tokens
        return not self.num_running and is_full

    def adopt(self, quota: Quota, at: float) -> None:
        """Change to another quota; tokens used up under the old one stay used up."""
        if quota == self.quota:
            return
        was_bounded, self.quota = self.quota.tokens_per_s is not None, quota
        self._balance = self.balance(at) if was_bounded else quota.burst_tokens

    def balance(self, at: float) -> float:
        """Return the tokens in the bucket at `at`, in time.monotonic(); below zero if too many were used."""
        if self.quota.tokens_per_s is not None:
            grown = self._balance + self.quota.tokens_per_s * max(0.0, at - self._at)
            self._balance = min(self.quota.burst_tokens, grown)
        self._at = max(at, self._at)
        return self._balance

    def take(self, num_tokens: int, at: float) -> None:
        """Take tokens out of the bucket, also more than it has."""
        self.num_reserved += num_tokens
        self._balance = self.balance(at) - num_tokens

    def give_back(self, num_tokens: int, at: float) -> None:
        """Put tokens back that were taken and not used."""
        self.num_returned += num_tokens
        self._balance = self.balance(at) + num_tokens

    def counts(self, at: float) -> UsageCounts:
        """Return this gateway's counts, to be told other gateways."""
        return UsageCounts(self.num_running, self.num_reserved, self.num_returned, self.balance(at))

    def note(self, gateway: str, counts: UsageCounts, at: float) -> None:
        """Apply the counts of another gateway to this bucket.

        From a gateway that is new here, all that it or this one has used is subtracted. Later, counts that fall are
        ignored and no more comes back than was taken, so no other process can fill this bucket."""
        if (known := self.elsewhere.get(gateway)) is None:
            taken = max(0, math.ceil(self.balance(at) - counts.balance))
            self._balance -= taken
        else:
            before, taken = known
            counts = counts._replace(
                num_reserved=max(counts.num_reserved, before.num_reserved),
                num_returned=max(counts.num_returned, before.num_returned),
            )
            num_taken = counts.num_reserved - before.num_reserved
            num_back = min(counts.num_returned - before.num_returned, taken + num_taken)
            taken += num_taken - num_back
            self._balance = self.balance(at) - num_taken + num_back
        self.elsewhere[gateway] = counts, taken


class Reservation:
    """What one request reserves of its tenant's quotas, from its entry to its end."""

    __slots__ = ("_usages", "_num_choices", "_num_tokens")

    def __init__(self, usages: Sequence[Usage], num_choices: int):
        self._usages, self._num_choices, self._num_tokens = usages, num_choices, 0
        for usage in usages:
            usage.num_running += num_choices

    def reserve(self, num_tokens: int, at: float) -> None:
        """Reserve the most tokens that the request can use, once that is known. Raises Overloaded if others have used
        up the quota meanwhile."""
        for usage in self._usages:
            _check_balance(usage, at)
        for usage in self._usages:
            usage.take(num_tokens, at)
        self._num_tokens += num_tokens

    def cover(self, num_used: int, at: float) -> None:
        """Raise the reservation to `num_used` tokens, also beyond the quota: a request that has begun continues, and
        later ones wait for the balance."""
        if (num_missing := num_used - self._num_tokens) > 0:
            for usage in self._usages:
                usage.take(num_missing, at)
            self._num_tokens = num_used

    def settle(self, num_used: int, at: float) -> None:
        """End the reservation at `num_used` tokens: the others are given back, or missing ones taken. Only the first
        call counts."""
        if self._num_choices:
            self.cover(num_used, at)
        for usage in self._usages:
            usage.give_back(max(0, self._num_tokens - num_used), at)
            usage.num_running -= self._num_choices
        self._num_choices = self._num_tokens = 0


def _check_balance(usage: Usage, at: float) -> None:
    rate = usage.quota.tokens_per_s
    if rate is not None and (balance := usage.balance(at)) <= 0:
        message = f"the tenant has used up its quota {usage.whose}of {rate:g} tokens_per_s"
        message += ", including what its running requests may still use"
        raise Overloaded(message, max(_RETRY_AFTER_S, (1 - balance) / rate), reason=protocol.TENANT_TOKENS)


class Quotas:
    """The quotas and the usage of all active tenants. Only callers with a credential get an entry, which is dropped
    when idle."""

    def __init__(self, table: Mapping[str, Quota], path: Path | None = None):
        """Keep the quotas of a table by usage name. `path`: its file, read again when it changes; a file that cannot be
        read changes nothing."""
        self._table, self._usage = table, dict[str, Usage]()
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
        usages = [self._of(tenant, at)]
        if model and self.quota(tenant, model).is_bounded:
            usages.append(self._of(tenant, at, model))
        for usage in usages:
            most = usage.quota.concurrent_requests
            if most is not None and num_choices > most:
                message = f"is {num_choices}, and concurrent_requests {usage.whose}of this tenant is {most}"
                raise InvalidRequest("sampling.n", message)
            if most is not None and usage.num_running + usage.num_elsewhere + num_choices > most:
                message = f"the tenant has {most} choices {usage.whose}running, its quota of concurrent_requests"
                raise Overloaded(message, _RETRY_AFTER_S, reason="TENANT_REQUESTS")
            _check_balance(usage, at)
        return Reservation(usages, num_choices)

    # ---- with other gateways ----

    def counts(self, at: float) -> dict[str, UsageCounts]:
        """Return this gateway's counts by usage name, for bounded tenants that are not idle; of more than MAX_COUNTED,
        those with most choices."""
        bounded = [
            (tenant, usage) for tenant, usage in self._usage.items() if usage.quota.is_bounded and not usage.is_idle(at)
        ]
        most = heapq.nlargest(MAX_COUNTED, bounded, key=lambda named: named[1].num_running)
        return {tenant: usage.counts(at) for tenant, usage in most}

    def note_others(self, counts: Mapping[str, Mapping[str, UsageCounts]], at: float) -> None:
        """Apply the latest counts of all other gateways, gateway -> usage name -> counts. What is missing uses nothing;
        the counts of tenants without a request here apply when one comes."""
        self._counts = counts
        for tenant, usage in self._usage.items():
            self._note(tenant, usage, at)

    def _note(self, tenant: str, usage: Usage, at: float) -> None:
        reporting = {gateway: tenants[tenant] for gateway, tenants in self._counts.items() if tenant in tenants}
        usage.elsewhere = {gateway: known for gateway, known in usage.elsewhere.items() if gateway in reporting}
        for gateway, counts in reporting.items():
            usage.note(gateway, counts, at)

    # ---- the table ----

    def _of(self, tenant: str, at: float, model: str = "") -> Usage:
        quota, name = self.quota(tenant, model), usage_name(tenant, model)
        if (usage := self._usage.get(name)) is None:
            usage = self._usage[name] = Usage(quota, at, self._num_counted, model)
            self._note(name, usage, at)
        usage.adopt(quota, at)
        return usage

    def _drop_idle(self, at: float) -> None:
        for tenant in [tenant for tenant, usage in self._usage.items() if usage.is_idle(at)]:
            self._num_counted = max(self._num_counted, self._usage.pop(tenant).num_reserved)

    def _read_again(self) -> None:
        if self._path is None or (stamp := file_stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._table = read_quotas(self._path)
            log.info("quotas read again %s", fields(tenants=len(self._table)))
        except ValueError as error:
            log.error("quotas: the old ones stay in use %s", fields(error=error))
