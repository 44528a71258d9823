"""The list of registered workers that the gateways of a stack share: a worker that registers with one is known to all.

Gateways that serve a model by one name and from one folder are of one stack. Workers of another stack may have the same
tokenizer and other weights. If there is no Redis, or it does not answer, a gateway knows only the workers that have
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
        """Write the workers `here`, each with the seconds for which it is registered, and return the workers that
        gateways have written: those of `known`, and a bounded number of others. They need not be trustworthy."""
        ...

    async def close(self) -> None:
        """Close connections."""


class LocalDirectory:
    """The directory of a gateway that shares no list with others: it is always empty."""

    async def exchange(self, here: Mapping[Entry, float], known: Collection[Entry] = ()) -> set[Entry]:
        return set()

    async def close(self) -> None:
        pass
