"""The token bucket of one tenant, and the counts of it that gateways exchange."""

import math
from collections.abc import Container
from typing import NamedTuple

from baton import protocol
from baton.service.errors import Overloaded
from gateway.queue.quota_file import Quota

_RETRY_AFTER_S = 0.5


class UsageCounts(NamedTuple):
    """One gateway's counts for one usage name. `num_running` counts choices; reserved and returned tokens only rise."""

    num_running: int
    num_reserved: int
    num_returned: int
    balance: float


class TenantBucket:
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

    def check_balance(self, at: float) -> None:
        """Raise Overloaded, which names the quota, if no tokens are left."""
        rate = self.quota.tokens_per_s
        if rate is not None and (balance := self.balance(at)) <= 0:
            message = f"the tenant has used up its quota {self.whose}of {rate:g} tokens_per_s"
            message += ", including what its running requests may still use"
            raise Overloaded(message, max(_RETRY_AFTER_S, (1 - balance) / rate), reason=protocol.TENANT_TOKENS)

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
        """Return this gateway's counts, to be shared with other gateways."""
        return UsageCounts(self.num_running, self.num_reserved, self.num_returned, self.balance(at))

    def merge(self, gateway: str, counts: UsageCounts, at: float) -> None:
        """Apply the counts of another gateway to this bucket.

        A gateway that is new here lowers the balance to its own, if that is lower. Later, counts that fall are ignored
        and no more comes back than was taken, so no other process can fill this bucket."""
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

    def keep(self, gateways: Container[str], at: float) -> None:
        """Forget all other gateways. Of what these took, what leaves the bucket lower than two bursts a gateway comes
        back: nobody stands for it any more, and a count that was wrong would refuse the tenant for years."""
        lowest = -2 * (1 + len(self.elsewhere)) * self.quota.burst_tokens
        gone = [gateway for gateway in self.elsewhere if gateway not in gateways]
        taken = sum(self.elsewhere.pop(gateway)[1] for gateway in gone)
        self._balance = max(self.balance(at), min(self._balance + taken, lowest))
