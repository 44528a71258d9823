"""The list of registered workers that gateways share: registering with one is registering with all.

Without Redis, or with one that does not answer, a gateway knows the workers that have registered with itself.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

Worker = tuple[str, str]  # (role, address)


class WorkerDirectory(Protocol):
    """A list of registered workers that gateways share."""

    async def exchange(self, here: Mapping[Worker, float], known: Collection[Worker] = ()) -> set[Worker]:
        """Write for how many seconds each of `here` is registered; return the workers that gateways have written: all
        that are `known`, and a bounded number of others. What is returned is not trusted."""
        ...

    async def close(self) -> None:
        """Close connections."""


class LocalDirectory:
    """The directory of a gateway that is alone: always empty."""

    async def exchange(self, here: Mapping[Worker, float], known: Collection[Worker] = ()) -> set[Worker]:
        return set()

    async def close(self) -> None:
        pass
