"""What each tenant may use: tokens a second, prompts and answers together, and requests at once; through this gateway,
and where they tell each other through all (shared_usage.py)."""

import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from baton.service.errors import Overloaded
from baton.service.logs import fields

OTHERS = "default"  # the table of all tenants that have none of their own
_BURST_S = 10.0  # of its rate, where the file gives no burst
_RETRY_AFTER_S = 0.5
_FIELDS = ("tokens_per_s", "burst_tokens", "concurrent_requests")
_LOOK_S = 1.0  # between two looks at the file

log = logging.getLogger(__name__)


class Quota(NamedTuple):
    """None: no bound."""

    tokens_per_s: float | None = None
    burst_tokens: float = 0.0
    concurrent_requests: int | None = None


def read_quotas(path: Path | None) -> Mapping[str, Quota]:
    """A TOML file of one table a tenant, and `default` for all others:

        [default]
        tokens_per_s = 20000
        burst_tokens = 100000       # 10 s of the rate when it is left out
        concurrent_requests = 32

    Raises ValueError, one line."""
    if path is None:
        return {}
    try:
        tables = tomllib.loads(path.read_text())
        return {name: _quota(name, table) for name, table in tables.items()}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _quota(name: str, table: object) -> Quota:
    if not isinstance(table, dict):
        raise ValueError(f"{name} is no table: write [{name}] and a line for each of {', '.join(_FIELDS)}")
    for field, value in table.items():
        if field not in _FIELDS:
            raise ValueError(f"[{name}] {field} is none of {', '.join(_FIELDS)}")
        kinds = int if field == "concurrent_requests" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e12:
            raise ValueError(f"[{name}] {field} = {value!r}: a number over 0 is needed")
    rate = table.get("tokens_per_s")
    if rate is None and "burst_tokens" in table:
        raise ValueError(f"[{name}] burst_tokens has no effect without tokens_per_s")
    return Quota(rate, table.get("burst_tokens", _BURST_S * (rate or 0)), table.get("concurrent_requests"))


class Usage:
    """What one tenant has left. Tokens are paid for when they are known, so a balance may fall below zero; whoever is
    there waits until it has been filled up."""

    __slots__ = ("quota", "num_running", "num_elsewhere", "num_paid", "_balance", "_at")

    def __init__(self, quota: Quota, at: float):
        self.quota, self.num_running = quota, 0
        self.num_elsewhere = 0  # requests that run through other gateways
        self.num_paid = 0  # tokens, through this one
        self._balance, self._at = quota.burst_tokens, at

    def adopt(self, quota: Quota, at: float) -> None:
        """Another quota from now on: what was used up of the old one stays so."""
        if quota == self.quota:
            return
        was_bounded, self.quota = self.quota.tokens_per_s is not None, quota
        self._balance = self.balance(at) if was_bounded else quota.burst_tokens

    def balance(self, at: float) -> float:
        if self.quota.tokens_per_s is not None:
            grown = self._balance + self.quota.tokens_per_s * max(0.0, at - self._at)
            self._balance = min(self.quota.burst_tokens, grown)
        self._at = max(at, self._at)
        return self._balance

    def pay(self, num_tokens: int, at: float) -> None:
        self.num_paid += num_tokens
        self.note_paid(num_tokens, at)

    def note_paid(self, num_tokens: int, at: float) -> None:
        """Through another gateway."""
        self._balance = self.balance(at) - num_tokens

    def note_balance(self, balance: float, at: float) -> None:
        """Of a gateway that this one had not heard of: whatever either has seen is used up."""
        self._balance = min(self.balance(at), balance)


class Told(NamedTuple):
    """What another gateway tells of one tenant; `num_paid` since it has started."""

    num_running: int
    num_paid: int
    balance: float


class Quotas:
    """Tenants come from credentials alone, so there are no more of them than the operator has named."""

    def __init__(self, table: Mapping[str, Quota], path: Path | None = None):
        """`path`: the table's file, read again when it has changed; one that cannot be read changes nothing."""
        self._table, self._usage = table, dict[str, Usage]()
        self._path, self._stamp, self._looked_at = path, _stamp(path), 0.0
        self._told: Mapping[str, Mapping[str, Told]] = {}

    def enter(self, tenant: str, at: float) -> None:
        """One more request. Raises Overloaded, which names the quota; else `leave` follows in the end."""
        self._look_again(at)
        usage = self._of(tenant, at)
        most, rate = usage.quota.concurrent_requests, usage.quota.tokens_per_s
        if most is not None and usage.num_running + usage.num_elsewhere >= most:
            told = f"tenant {tenant} has {most} requests running, its quota of concurrent_requests"
            raise Overloaded(told, _RETRY_AFTER_S, reason="TENANT_REQUESTS")
        if rate is not None and (balance := usage.balance(at)) <= 0:
            told = f"tenant {tenant} has used up its quota of {rate:g} tokens_per_s"
            raise Overloaded(told, max(_RETRY_AFTER_S, (1 - balance) / rate), reason="TENANT_TOKENS")
        usage.num_running += 1

    def pay(self, tenant: str, num_tokens: int, at: float) -> None:
        self._of(tenant, at).pay(num_tokens, at)

    def leave(self, tenant: str) -> None:
        self._usage[tenant].num_running -= 1

    # ---- with other gateways ----

    def told(self, at: float) -> dict[str, Told]:
        """What goes through this gateway, of tenants that are bounded."""
        return {
            tenant: Told(usage.num_running, usage.num_paid, usage.balance(at))
            for tenant, usage in self._usage.items()
            if usage.quota != Quota() and (usage.num_running or usage.num_paid)
        }

    def note_others(self, told: Mapping[str, Mapping[str, Told]], at: float) -> None:
        """What all others tell now, gateway -> tenant -> Told; who is not among them uses nothing."""
        for usage in self._usage.values():
            usage.num_elsewhere = 0
        for gateway, tenants in told.items():
            before = self._told.get(gateway)
            for tenant, now_told in tenants.items():
                usage = self._of(tenant, at)
                usage.num_elsewhere += now_told.num_running
                if before is None:
                    usage.note_balance(now_told.balance, at)
                else:
                    usage.note_paid(now_told.num_paid - (before[tenant].num_paid if tenant in before else 0), at)
        self._told = told

    # ---- the table ----

    def _of(self, tenant: str, at: float) -> Usage:
        quota = self._table.get(tenant) or self._table.get(OTHERS) or Quota()
        if (usage := self._usage.get(tenant)) is None:
            usage = self._usage[tenant] = Usage(quota, at)
        usage.adopt(quota, at)
        return usage

    def _look_again(self, at: float) -> None:
        if self._path is None or at - self._looked_at < _LOOK_S:
            return
        self._looked_at = at
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._table = read_quotas(self._path)
            log.info("quotas read again %s", fields(tenants=len(self._table)))
        except ValueError as error:
            log.error("quotas: the old ones go on %s", fields(error=error))


def _stamp(path: Path | None) -> tuple[int, ...] | None:
    """Another one when the file is; None: there is none."""
    try:
        found = path and path.stat()
    except OSError:
        return None
    return found and (found.st_mtime_ns, found.st_size, found.st_ino)
