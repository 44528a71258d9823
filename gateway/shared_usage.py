"""What tenants use through all gateways on one Redis: each tells what goes through it, and counts what the others tell.

    baton:gateways       sorted set of gateways; the score is when it is over, in seconds by the clock of Redis
    baton:usage:<hex>    {tenant: [requests that run, tokens paid since its start, tokens left]}; expires

No request waits for it: a tenant may have more than its quota by what gateways let in between two tellings, each
without knowing of the other. Gateways that do not see each other, since one of them is cut off from Redis or Redis is
gone, forget each other after TTL_S and count alone: a tenant then has as many quotas as there are such parts.
"""

import asyncio
import json
import logging
import math
from collections.abc import Mapping

from baton.service.credentials import TENANT
from baton.service.logs import fields
from gateway.quotas import Quotas, Told
from gateway.redis_client import FAILURES, cancelled, make_client, words_of
from gateway.timing import now

NAME = "baton:gateways"
TTL_S = 5
PERIOD_S = 0.25
_MAX_BYTES, _MAX_GATEWAYS = 1 << 20, 256

log = logging.getLogger(__name__)


class SharedUsage:
    """Of one gateway; `run()` is its life. Belongs to the event loop."""

    def __init__(self, quotas: Quotas, url: str, gateway: bytes):
        """Raises ValueError for a URL that is none."""
        self._quotas, self._gateway = quotas, gateway.hex()
        self._client = make_client(url, 1.0, 1)
        self._answered_at = now()
        self._was_up = True

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while not cancelled():
                await self._look()
                await asyncio.sleep(PERIOD_S)
        finally:
            await self._client.aclose()

    async def _look(self) -> None:
        try:
            told = await self.exchange()
        except FAILURES as error:
            if self._was_up:
                log.warning("redis: quotas are counted without other gateways %s", fields(error=words_of(error)))
            self._was_up = False
            if now() - self._answered_at > TTL_S:
                self._quotas.note_others({}, now())
            return
        self._answered_at, self._was_up = now(), True
        self._quotas.note_others(told, now())

    async def exchange(self) -> dict[str, Mapping[str, Told]]:
        """Tells, and returns what all others have told. Raises one of FAILURES."""
        seconds, _ = await self._client.time()
        async with self._client.pipeline(transaction=True) as batch:
            batch.zremrangebyscore(NAME, "-inf", seconds)
            batch.zadd(NAME, {self._gateway: seconds + TTL_S})
            batch.set(_name(self._gateway), json.dumps(self._quotas.told(now())), ex=TTL_S)
            batch.zrange(NAME, 0, _MAX_GATEWAYS)
            *_, found = await batch.execute()
        others = [name for member in found if (name := _hex(member)) and name != self._gateway]
        values = await self._client.mget(list(map(_name, others))) if others else []
        return {name: told for name, value in zip(others, values, strict=True) if (told := _read(value)) is not None}


def _name(gateway: str) -> str:
    return f"baton:usage:{gateway}"


def _hex(member: object) -> str:
    """What lies in Redis is not trusted."""
    try:
        return bytes.fromhex(member.decode()).hex()
    except (AttributeError, ValueError):
        return ""


def _read(value: object) -> dict[str, Told] | None:
    """None: nothing that a gateway would write."""
    if not isinstance(value, bytes) or len(value) > _MAX_BYTES:
        return None
    try:
        told = {name: Told(*numbers) for name, numbers in json.loads(value).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    is_good = all(TENANT.fullmatch(name) and _is_good(each) for name, each in told.items())
    return told if is_good else None


def _is_good(told: Told) -> bool:
    numbers = (told.num_running, told.num_paid, told.balance)
    if not all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers):
        return False
    return 0 <= told.num_running < 1e9 and abs(told.num_paid) < 1e18 and abs(told.balance) < 1e18
