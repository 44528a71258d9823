"""One leader among scalers: a name in Redis that expires. Whoever holds it decides; without Redis' answer nobody
does."""

import logging

from baton.service.logs import fields
from gateway.store.redis_client import FAILURES, make_client, words_of

NAME = "baton:scaler:leader"
TTL_S = 30.0  # a leader that died is followed within this
_TIMEOUT_S = 2.0
# Both ask for the name's own value and act in one call: between two the lease could pass to another.
_RENEW = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end return 0"
_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"

log = logging.getLogger(__name__)


class LeaderLease:
    """The lease of one scaler. `hold` before each decision and oftener than TTL_S."""

    def __init__(self, url: str, owner: str, ttl_s: float = TTL_S):
        """Raises ValueError for a malformed URL."""
        self._client, self._owner, self._ttl_ms = make_client(url, _TIMEOUT_S, 1), owner.encode(), round(1000 * ttl_s)

    async def hold(self) -> bool:
        """Take or renew the lease; return whether it is ours now."""
        try:
            if await self._client.set(NAME, self._owner, nx=True, px=self._ttl_ms):
                return True
            return bool(await self._client.eval(_RENEW, 1, NAME, self._owner, self._ttl_ms))  # pyright: ignore[reportGeneralTypeIssues]
        except FAILURES as error:
            log.warning("no decision: Redis does not say who leads %s", fields(error=words_of(error)))
            return False

    async def release(self) -> None:
        """Give the lease up, if it is ours: another scaler need not wait for its end."""
        try:
            await self._client.eval(_RELEASE, 1, NAME, self._owner)  # pyright: ignore[reportGeneralTypeIssues]
        except FAILURES:
            pass  # it expires
        finally:
            await self._client.aclose()
