"""Hold the adapters of an engine by identity: a digest of weights and config, never a name. Each has a copy on the
host, as it was read; some are ready to be applied, in slots."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from baton.engine.adapters.lora_folder import LoraFolder
from baton.engine.adapters.low_rank import LowRank
from baton.engine.core.request import Refusal
from baton.protocol import ADAPTER_LOADING, ADAPTER_SLOTS, NO_ADAPTER

_RETRY_S = 0.02  # a request that found its adapter or a slot not ready may try again after this time
# A ready adapter keeps its slot so long for the request that waited for it: gateways ask again within a second.
_AWAITED_S = 2.0
# The same once another adapter lacks a slot: the first request in a gateway's queue asks again after 0.05 s.
_LACKED_S = 0.25
# One that requests have asked for for so long has the oldest of the others take no new requests, until it has a slot.
_STARVED_S = 2.0
_PAUSE_S = 10.0  # after a failure to make an adapter ready, it is tried again after this time

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """Hold an adapter ready to be applied. Its holders may use it whatever happens to its name meanwhile."""

    name: str
    source: LoraFolder
    # By the field of `Layer` that each adds to; empty for layers of other processes.
    layers: tuple[Mapping[str, LowRank], ...]
    made_at: float = field(default_factory=time.monotonic)

    @property
    def identity(self) -> bytes:
        return self.source.identity

    @property
    def num_bytes(self) -> int:
        return sum(pair.num_bytes for layer in self.layers for pair in layer.values())


class AdaptedModel(Protocol):
    """Read and make adapters for a model. Both methods raise ModelError."""

    def read_adapter(self, folder: Path) -> LoraFolder:
        """Return an adapter as it was read, whole in memory."""
        ...

    def make_adapter(self, name: str, lora: LoraFolder) -> Adapter:
        """Return an adapter that is ready to be applied."""
        ...


class Adapters:
    """Hold adapters and their slots; thread-safe. At most `num_slots` are ready at a time: those in use and those last
    used."""

    def __init__(self, model: AdaptedModel, num_slots: int | None = None):
        """Hold adapters for `model`; without `num_slots` the slots are unlimited."""
        self._model, self._num_slots = model, num_slots
        self._lock = threading.Lock()
        self._copies: dict[str, LoraFolder] = {}  # by name
        self._ready: dict[bytes, Adapter] = {}  # the least recently used come first
        # Nameless adapters, if slots are unlimited and nothing is evicted: each lives as long as requests hold it.
        self._unnamed: WeakValueDictionary[bytes, Adapter] = WeakValueDictionary()
        self._making: dict[bytes, Future[Adapter]] = {}  # each has its slot already
        # Adapters that no request has taken since they became ready, time.monotonic().
        self._awaited_until: dict[bytes, float] = {}
        # Adapters for which all slots were in use: when they were first and last asked for, time.monotonic().
        self._lacked: dict[bytes, tuple[float, float]] = {}
        self._yields_until = 0.0  # until when the oldest in a slot takes no new requests, time.monotonic()
        self._retry_at: dict[bytes, float] = {}  # adapters that could not be made ready, time.monotonic()
        self._thread = ThreadPoolExecutor(1, "adapters")

    def add(self, name: str, folder: Path) -> bytes:
        """Read an adapter and give it to requests from now on, replacing one of the same name; return its identity.
        Raises ModelError, and then nothing has changed."""
        copy = self._model.read_adapter(folder)
        made = self._model.make_adapter(name, copy)  # finds what is wrong with it
        with self._lock:
            self._copies[name] = copy
            if self._has_slot and not {copy.identity} & (self._ready.keys() | self._making.keys()):
                self._ready[copy.identity] = self._unnamed.get(copy.identity) or made
            self._let_go()
        return copy.identity

    def remove(self, name: str) -> bool:
        """Hide an adapter from new requests; return whether it existed."""
        with self._lock:
            was_here = self._copies.pop(name, None) is not None
            self._let_go()
            return was_here

    def find(self, identity: bytes, in_use: Callable[[], Collection[Adapter]]) -> Adapter:
        """Return the adapter of this identity; `in_use()` returns those that live requests hold. Raises Refusal:
        no_adapter if it is unknown, or for a while after it could not be made ready; adapter_loading while it is being
        made ready; adapter_slots if all slots are in use, or if it has to leave its slot to one that lacks one."""
        with self._lock:
            ready, copy = self._ready.get(identity) or self._unnamed.get(identity), self._copy(identity)
            # A leg may still ask for a nameless one, as long as the request that began with it is here.
            if ready is not None and (copy is not None or ready in in_use()):
                if copy is not None and self._yields(ready):
                    raise Refusal(ADAPTER_SLOTS, retry_after_s=_RETRY_S)
                if identity in self._ready:
                    self._ready[identity] = self._ready.pop(identity)
                    self._awaited_until.pop(identity, None)
                return ready
            if copy is None or time.monotonic() < self._retry_at.get(identity, 0.0):
                raise Refusal(NO_ADAPTER, retry_after_s=0.0)
            if identity not in self._making:
                if not self._has_slot and not self._evict(in_use()):
                    self._note_lacked(identity)
                    raise Refusal(ADAPTER_SLOTS, retry_after_s=_RETRY_S)
                if self._lacked.pop(identity, None) is not None:
                    self._yields_until = 0.0
                self._making[identity] = self._thread.submit(self._make_ready, identity, *copy)
            raise Refusal(ADAPTER_LOADING, retry_after_s=_RETRY_S)

    def wait(self, identity: bytes) -> None:
        """Wait until an adapter that is being made ready is ready. Raises what making it raises."""
        with self._lock:
            making = self._making.get(identity)
        if making is not None:
            making.result()

    @property
    def summary(self) -> str:
        """Return the words on adapters for the engine's start line."""
        with self._lock:
            names, mebibytes = list(self._copies), sum(each.num_bytes for each in self._ready.values()) / (1 << 20)
        slots = "" if self._num_slots is None else f" of {self._num_slots} slots"
        return f"; adapters {', '.join(names)} ({mebibytes:.1f} MiB{slots})" if names else ""

    def listed(self) -> dict[str, bytes]:
        """Return the identities of all adapters that requests may name, by name."""
        with self._lock:
            return {name: copy.identity for name, copy in self._copies.items()}

    @property
    def ready(self) -> list[bytes]:
        """Return the identities of the adapters in slots, least recently used first."""
        with self._lock:
            return list(self._ready)

    @property
    def reported_ready(self) -> tuple[bytes, ...]:
        """Return the identities of the adapters in slots; empty if slots are unlimited, since then each is ready."""
        return () if self._num_slots is None else tuple(self.ready)

    def _copy(self, identity: bytes) -> tuple[str, LoraFolder] | None:
        return next((each for each in self._copies.items() if each[1].identity == identity), None)

    @property
    def _has_slot(self) -> bool:
        return self._num_slots is None or len(self._ready) + len(self._making) < self._num_slots

    def _let_go(self) -> None:
        """Leave adapters that lost their last name to the requests that hold them, if slots are unlimited."""
        if self._num_slots is None:
            named = {copy.identity for copy in self._copies.values()}
            for identity in self._ready.keys() - named:
                self._unnamed[identity] = self._ready.pop(identity)

    def _evict(self, in_use: Collection[Adapter]) -> bool:
        """Empty the slot of an adapter that nobody uses or waits for, preferably a nameless one; return whether there
        was one. If there was none, an adapter that a request waits for keeps its slot only briefly: another worker may
        have served that request."""
        now = time.monotonic()
        unnamed = {identity for identity in self._ready if self._copy(identity) is None}
        awaited = {identity for identity, until in self._awaited_until.items() if now < until} - unnamed
        idle = [
            identity for identity, adapter in self._ready.items() if adapter not in in_use and identity not in awaited
        ]
        idle.sort(key=lambda identity: identity not in unnamed)
        for identity in idle[:1]:
            del self._ready[identity]
            self._awaited_until.pop(identity, None)
        if not idle and awaited:
            first = min(awaited, key=self._awaited_until.__getitem__)
            self._awaited_until[first] = min(self._awaited_until[first], now + _LACKED_S)
        return bool(idle)

    def _note_lacked(self, identity: bytes) -> None:
        """Note that an adapter is asked for and has no slot. If that lasts, the oldest in a slot is to leave it as its
        requests end: otherwise streams that overlap keep all others out."""
        now = time.monotonic()
        self._lacked = {each: times for each, times in self._lacked.items() if now - times[1] < _STARVED_S}
        since, _ = self._lacked.get(identity, (now, now))
        self._lacked[identity] = since, now
        if now - since >= _STARVED_S:
            self._yields_until = now + _STARVED_S

    def _yields(self, adapter: Adapter) -> bool:
        if time.monotonic() >= self._yields_until:
            return False
        return adapter is min(self._ready.values(), key=lambda each: each.made_at, default=None)

    def _make_ready(self, identity: bytes, name: str, copy: LoraFolder) -> Adapter:
        """Make an adapter ready in its slot."""
        try:
            made = self._model.make_adapter(name, copy)
            with self._lock:
                self._ready[identity] = made
                self._awaited_until[identity] = time.monotonic() + _AWAITED_S
            return made
        except Exception:
            logger.exception("adapter %s cannot be made ready, and is refused for %g s", name, _PAUSE_S)
            with self._lock:
                self._retry_at[identity] = time.monotonic() + _PAUSE_S
            raise
        finally:
            with self._lock:
                self._making.pop(identity, None)
