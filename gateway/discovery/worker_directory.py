"""The list of registered workers that gateways of one stack share: registering with one is registering with all.

Of one stack are the gateways that serve a model by one name and from one folder. What another stack has may have the
same tokenizer and other weights. Without Redis, or with one that does not answer, a gateway knows the workers that have
registered with itself.
"""

import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

Worker = tuple[str, str]  # (role, address)
Entry = tuple[str, str, str]  # (role, address, stack)


def stack_of(model_name: str, folder: Path) -> str:
    """Return the stack of the gateways that serve this folder, or .gguf file, by this name."""
    return hashlib.sha256(f"{model_name} ".encode() + os.fsencode(folder.resolve())).hexdigest()[:16]


class WorkerDirectory(Protocol):
    """A list of registered workers that gateways share."""

    async def exchange(self, here: Mapping[Entry, float], known: Collection[Entry] = ()) -> set[Entry]:
        """Write for how many seconds each of `here` is registered; return the workers that gateways have written: all
        that are `known`, and a bounded number of others. What is returned is not trusted."""
        ...

    async def close(self) -> None:
        """Close connections."""


class LocalDirectory:
    """The directory of a gateway that is alone: always empty."""

    async def exchange(self, here: Mapping[Entry, float], known: Collection[Entry] = ()) -> set[Entry]:
        return set()

    async def close(self) -> None:
        pass
