"""The adapters that an engine holds, by identity: a digest of weights and config, never a name."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from baton.engine.adapters.low_rank import LowRank


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
        # Of those without a name, the ones that requests still hold: a leg of such a request may yet come.
        self._held: WeakValueDictionary[bytes, Adapter] = WeakValueDictionary()

    def add(self, name: str, folder: Path) -> Adapter:
        """Read an adapter, and give it to requests from now on: a name that is taken stands for this one. Raises ModelError,
        and then nothing has changed."""
        made = self._load(name, folder)
        with self._lock:
            self._by_name[name] = self._held[made.identity] = made
        return made

    def remove(self, name: str) -> bool:
        """Take an adapter from new requests; return whether there was one."""
        with self._lock:
            return self._by_name.pop(name, None) is not None

    def find(self, identity: bytes) -> Adapter | None:
        """Return the adapter of this identity, or None."""
        with self._lock:
            named = (each for each in self._by_name.values() if each.identity == identity)
            return next(named, None) or self._held.get(identity)

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
