"""Share the usage of tenants among all gateways on one Redis: each writes its counts, and adds those of the others.

    baton:gateways       sorted set of gateways; the score is when it expires, in seconds by the clock of Redis
    baton:usage:<hex>    expires; {tenant, or tenant@digest of a model's name:
                         [choices that run, tokens reserved and returned since its start, tokens left]}

No request waits for this exchange, so other gateways count what one admits up to 2 x PERIOD_S later. Until then each
gateway admits what the bounds allow: with G gateways a tenant may have G times its choices running, use G times its
remaining tokens and what they grow by meanwhile, and one request more on each gateway. From then on the rate holds for
all gateways together: what was used too much between two exchanges is missing afterwards. Of what gateways used before
they knew of each other, only the most that one of them used counts.

Gateways that cannot see each other, because one is cut off from Redis or Redis is down, forget each other after TTL_S
and count alone. A tenant then has one quota for each such group of gateways.
"""

import asyncio
import json
import logging
import re
from collections.abc import Mapping

from baton.lines import describe_error
from baton.service.clock import now
from baton.service.logs import fields
from baton.service.security.credentials import TENANT
from baton.tasks import is_cancelled
from gateway.queue.quotas import MAX_COUNTED, Quotas
from gateway.queue.token_bucket import UsageCounts
from gateway.store.redis_client import make_client, remove_wrong_type

NAME = "baton:gateways"
TTL_S = 5
PERIOD_S = 0.25
_MAX_BYTES = 48 << 10  # of one value: MAX_COUNTED tenants
_MAX_GATEWAYS = 64
_NAMES = "?" * 32  # Redis does not send names of another form
_MOST = 1 << 53
_USAGE = re.compile(f"{TENANT.pattern}(@[0-9a-f]{{16}})?")

log = logging.getLogger(__name__)


class SharedUsage:
    """Exchange the counts of one gateway with those of others. Belongs to the event loop."""

    def __init__(self, quotas: Quotas, url: str, gateway: bytes):
        """Prepare the exchange through the Redis at `url`. Raises ValueError for a malformed URL."""
        self._quotas, self._gateway = quotas, gateway.hex()
        self._client = make_client(url, 1.0, 1)
        self._told: dict[str, tuple[object, dict[str, UsageCounts]]] = {}  # gateway -> its latest value, and as read
        self._answered_at = now()
        self._was_up = True

    async def run(self) -> None:
        """Exchange counts every PERIOD_S, until cancelled."""
        try:
            while not is_cancelled():
                await self._look()
                await asyncio.sleep(PERIOD_S)
        finally:
            await self._client.aclose()

    async def _look(self) -> None:
        try:
            counts = await self.exchange()
        except Exception as error:  # any failure: requests are still served, and the next round tries again
            if self._was_up:
                log.warning("redis: quotas are counted without other gateways %s", fields(error=describe_error(error)))
            self._was_up = False
            if now() - self._answered_at > TTL_S:
                self._quotas.note_others({}, now())
            await remove_wrong_type(self._client, NAME, error)
            return
        if not self._was_up:
            log.info("redis: quotas are counted with other gateways again")
        self._answered_at, self._was_up = now(), True
        self._quotas.note_others(counts, now())

    async def exchange(self) -> dict[str, Mapping[str, UsageCounts]]:
        """Write this gateway's counts; return those of all others. Raises one of FAILURES."""
        seconds, _ = await self._client.time()
        async with self._client.pipeline(transaction=True) as batch:
            batch.zremrangebyscore(NAME, "-inf", seconds)
            batch.zadd(NAME, {self._gateway: seconds + TTL_S})
            batch.set(_name(self._gateway), json.dumps(self._quotas.counts(now())), ex=TTL_S)
            batch.zscan(NAME, 0, match=_NAMES, count=4 * _MAX_GATEWAYS)
            *_, (_, found) = await batch.execute()
        names = [name for member, _ in found if (name := _hex(member)) and name != self._gateway][:_MAX_GATEWAYS]
        async with self._client.pipeline(transaction=False) as batch:
            for name in names:
                batch.getrange(_name(name), 0, _MAX_BYTES)
            values = await batch.execute(raise_on_error=False)
        self._told = {name: await self._read(name, value) for name, value in zip(names, values, strict=True)}
        return {name: counts for name, (_, counts) in self._told.items() if counts}

    async def _read(self, name: str, value: object) -> tuple[object, dict[str, UsageCounts]]:
        """Return a gateway's value and the counts in it. Each takes a turn of the loop: 6 ms at worst."""
        if (known := self._told.get(name)) and known[0] == value:
            return known
        await asyncio.sleep(0)
        return value, read_counts(value)


def _name(gateway: str) -> str:
    return f"baton:usage:{gateway}"


def _hex(member: bytes) -> str:
    """Return a gateway's name in hex, or "" for a member that is no such name."""
    try:
        return bytes.fromhex(member.decode()).hex()
    except ValueError:
        return ""


def read_counts(value: object) -> dict[str, UsageCounts]:
    """Return the counts in a value of Redis, or {} if no gateway could have written it: Redis is not trusted."""
    if not isinstance(value, bytes) or len(value) > _MAX_BYTES:
        return {}
    try:
        tenants = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(tenants, dict) or len(tenants) > MAX_COUNTED:
        return {}
    if not all(map(_is_good, tenants, tenants.values())):
        return {}
    return {tenant: UsageCounts(*numbers) for tenant, numbers in tenants.items()}


def _is_good(tenant: str, numbers: object) -> bool:
    if not _USAGE.fullmatch(tenant) or not isinstance(numbers, list) or len(numbers) != len(UsageCounts._fields):
        return False
    *counts, balance = numbers
    if not all(type(count) is int and 0 <= count <= _MOST for count in counts):
        return False
    counts = UsageCounts(*numbers)
    return counts.num_returned <= counts.num_reserved and type(balance) in (int, float) and abs(balance) <= _MOST
