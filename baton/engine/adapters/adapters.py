"""The adapters that an engine holds, by identity: a digest of weights and config, never a name."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.engine.adapters.low_rank import LowRank
from baton.engine.core.model_errors import ModelError


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """An adapter ready to be applied. Who holds it may use it, whatever becomes of its name meanwhile."""

    name: str
    identity: bytes
    layers: tuple[Mapping[str, LowRank], ...]  # by the field of `Layer` that each adds to

    @property
    def num_bytes(self) -> int:
        return sum(pair.num_bytes for layer in self.layers for pair in layer.values())


class Adapters:
    """Thread-safe."""

    def __init__(self, load: Callable[[str, Path], Adapter]):
        """`load(name, folder)` reads one. Raises ModelError."""
        self._load, self._lock = load, threading.Lock()
        self._by_name: dict[str, Adapter] = {}

    def add(self, name: str, folder: Path) -> Adapter:
        """Read an adapter, and give it to requests from now on. Raises ModelError where it cannot be, or where the name
        is taken."""
        made = self._load(name, folder)
        with self._lock:
            if name in self._by_name:
                raise ModelError(f"{folder}: there is an adapter {name} already")
            self._by_name[name] = made
        return made

    def find(self, identity: bytes) -> Adapter | None:
        """Return the adapter of this identity, or None."""
        with self._lock:
            return next((each for each in self._by_name.values() if each.identity == identity), None)

    @property
    def words(self) -> str:
        """Return the words for the engine's start line."""
        listed = self.listed()
        mebibytes = sum(each.num_bytes for each in listed) / (1 << 20)
        return f"; adapters {', '.join(each.name for each in listed)} ({mebibytes:.1f} MiB)" if listed else ""

    def listed(self) -> tuple[Adapter, ...]:
        """Return all that requests may name."""
        with self._lock:
            return tuple(self._by_name.values())
