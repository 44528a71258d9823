"""The list of registered workers that gateways share in Redis.

baton:workers    sorted set of "ROLE HOST:PORT STACK"; the score is when the entry expires, in seconds of Redis's clock
"""

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

from baton.lines import describe_error
from baton.service.logs import fields
from gateway.discovery.worker_directory import Entry
from gateway.store.redis_client import FAILURES, TooMuch, make_client, remove_wrong_type

NAME = "baton:workers"
MAX_NAMES = 4096  # entries that are read in one look
MAX_LEFT_S = 60  # no gateway writes an entry that lasts longer
_LACKS = "it lacks ZMSCORE or ZRANGE with REV, use Redis 6.2 or newer"

log = logging.getLogger(__name__)


class RedisDirectory:
    """A directory in Redis. After a failure it is empty until Redis answers again; sessions that are up stay up."""

    def __init__(self, url: str):
        self._client = make_client(url, 1.0, 1)
        self._was_up = True

    async def exchange(self, here: Mapping[Entry, float], known: Collection[Entry] = ()) -> set[Entry]:
        try:
            found = await self._exchange(here, sorted(known))
        except FAILURES as error:
            if self._was_up:
                log.warning("redis: workers of other gateways are not known %s", fields(error=_describe(error)))
            self._was_up = False
            await remove_wrong_type(self._client, NAME, error)
            return set()
        if not self._was_up:
            log.info("redis: workers of other gateways are known again")
        self._was_up = True
        return found

    async def _exchange(self, here: Mapping[Entry, float], known: list[Entry]) -> set[Entry]:
        """Write and read the directory; the latest entries are read first. Raises one of FAILURES."""
        seconds, _ = await self._client.time()
        await self._client.zremrangebyscore(NAME, "-inf", seconds)
        await self._client.zremrangebyscore(NAME, f"({seconds + MAX_LEFT_S}", "+inf")
        if here:
            members = {" ".join(entry): seconds + math.ceil(left_s) for entry, left_s in here.items()}
            await self._client.zadd(NAME, members)
        asked = known[:MAX_NAMES]
        scores = await self._client.zmscore(NAME, [" ".join(entry) for entry in asked]) if asked else []
        found = {entry for entry, score in zip(asked, scores, strict=True) if score is not None}
        return found.union(entry for member in await self._names() if (entry := _read(member)))

    async def _names(self) -> list[object]:
        try:
            found: Any = await self._client.execute_command("ZRANGE", NAME, 0, MAX_NAMES - 1, "REV")
        except TooMuch:  # entries longer than any address hide the others; those that are known are read by `zmscore`
            return []
        return found[:MAX_NAMES]

    async def close(self) -> None:
        await self._client.aclose()


def _describe(error: Exception) -> str:
    """Describe a failure in one line, and say so if Redis is too old for a command."""
    is_new_there = str(error).startswith(("unknown command", "syntax error"))
    return f"{_LACKS}: {describe_error(error)}" if is_new_there else describe_error(error)


def _read(member: Any) -> Entry | None:
    """Return an entry, or None if no gateway would write this. Older gateways write no stack."""
    try:
        role, address, *stacks = member.decode("ascii").split(" ")
    except (AttributeError, UnicodeDecodeError, ValueError):
        return None
    return (role, address, "".join(stacks)) if len(stacks) < 2 else None
