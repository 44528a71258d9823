"""The list of registered workers that gateways share in Redis, so that a worker that has told one has told all.

    baton:workers    sorted set of "ROLE HOST:PORT"; the score is when it is over, in seconds by the clock of Redis

Without Redis, or with one that does not answer, a gateway knows the workers that have registered with itself.
"""

import logging
import math
from collections.abc import Mapping
from typing import Protocol

from baton.service.logs import fields

NAME = "baton:workers"
_ROLES = ("prefill", "decode")

log = logging.getLogger(__name__)


class Roster(Protocol):
    """A worker is (role, address)."""

    async def exchange(self, here: Mapping[tuple[str, str], float]) -> set[tuple[str, str]]:
        """Tells for how many seconds each of `here` is there; returns all that any gateway has told of."""

    async def close(self) -> None: ...


class OwnRoster:
    """Of a gateway that is alone."""

    async def exchange(self, here: Mapping[tuple[str, str], float]) -> set[tuple[str, str]]:
        return set()

    async def close(self) -> None:
        pass


class RedisRoster:
    """Every failure is an empty list: sessions that stand go on."""

    def __init__(self, url: str):
        from gateway.redis_client import FAILURES, make_client

        self._client, self._failures = make_client(url, 1.0, 1), FAILURES
        self._was_up = True

    async def exchange(self, here: Mapping[tuple[str, str], float]) -> set[tuple[str, str]]:
        try:
            seconds, _ = await self._client.time()
            await self._client.zremrangebyscore(NAME, "-inf", seconds)
            if here:
                members = {" ".join(worker): seconds + math.ceil(left_s) for worker, left_s in here.items()}
                await self._client.zadd(NAME, members)
            found = await self._client.zrange(NAME, 0, -1)
        except self._failures as error:
            if self._was_up:
                log.warning("redis: workers of other gateways are not known %s", fields(error=type(error).__name__))
            self._was_up = False
            return set()
        self._was_up = True
        return {worker for member in found if (worker := _read(member))}

    async def close(self) -> None:
        await self._client.aclose()


def make_roster(redis_url: str | None) -> Roster:
    return RedisRoster(redis_url) if redis_url else OwnRoster()


def _read(member: object) -> tuple[str, str] | None:
    """What lies in Redis is not trusted."""
    try:
        role, address = member.decode().split(" ")
    except (AttributeError, UnicodeDecodeError, ValueError):
        return None
    return (role, address) if role in _ROLES else None
