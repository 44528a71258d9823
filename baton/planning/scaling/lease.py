"""Elect one leader among scalers by a key in Redis that expires. The holder decides; while Redis does not answer, no
scaler decides."""

import logging

from baton.lines import describe_error
from baton.service.logs import fields
from gateway.store.redis_client import FAILURES, make_client

NAME = "baton:scaler:leader"
TTL_S = 30.0  # after which a leader that died is replaced
_TIMEOUT_S = 2.0
# Both compare the value and act in one call: between two calls the lease could pass to another scaler.
_RENEW = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end return 0"
_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"

log = logging.getLogger(__name__)


class LeaderLease:
    """The lease of one scaler. Call `hold` before each decision, and more often than every TTL_S."""

    def __init__(self, url: str, owner: str, ttl_s: float = TTL_S):
        """Prepare the client. Raises ValueError for a malformed URL."""
        self._client, self._owner, self._ttl_ms = make_client(url, _TIMEOUT_S, 1), owner.encode(), round(1000 * ttl_s)
        self._was_up = True

    async def hold(self) -> bool:
        """Take or renew the lease; return whether this scaler holds it now."""
        try:
            is_held = await self._client.set(NAME, self._owner, nx=True, px=self._ttl_ms)
            if not is_held:
                is_held = await self._client.eval(_RENEW, 1, NAME, self._owner, self._ttl_ms)  # pyright: ignore[reportGeneralTypeIssues]
        except FAILURES as error:
            if self._was_up:
                log.warning("no decisions: Redis does not say who leads %s", fields(error=describe_error(error)))
            self._was_up = False
            return False
        if not self._was_up:
            log.info("Redis says who leads again")
        self._was_up = True
        return bool(is_held)

    async def release(self) -> None:
        """Release the lease if this scaler holds it, so that another need not wait for it to expire."""
        try:
            await self._client.eval(_RELEASE, 1, NAME, self._owner)  # pyright: ignore[reportGeneralTypeIssues]
        except FAILURES:
            pass  # the lease expires
        finally:
            await self._client.aclose()
