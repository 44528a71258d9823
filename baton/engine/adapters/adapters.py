"""The adapters that an engine holds, by identity: a digest of weights and config, never a name. Each has a host copy,
as it was read; some are ready to be applied, in slots."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from baton.engine.adapters.lora_folder import LoraFolder
from baton.engine.adapters.low_rank import LowRank
from baton.engine.core.request import Refusal
from baton.protocol import ADAPTER_LOADING, ADAPTER_SLOTS, NO_ADAPTER

_RETRY_S = 0.02  # after which one that is made ready is, and a slot may be free
_AWAITED_S = 2.0  # for which one that is ready keeps its slot for who asked for it: gateways ask again within a second
_LACKED_S = 0.25  # for which it does once another lacks a slot: the first of a gateway's line asks again after 0.05 s
_PAUSE_S = 10.0  # after which one that could not be made ready is tried again

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """An adapter ready to be applied. Who holds it may use it, whatever becomes of its name meanwhile."""

    name: str
    source: LoraFolder
    layers: tuple[Mapping[str, LowRank], ...]  # by the field of `Layer` that each adds to; none where others have it

    @property
    def identity(self) -> bytes:
        return self.source.identity

    @property
    def num_bytes(self) -> int:
        return sum(pair.num_bytes for layer in self.layers for pair in layer.values())


class AdaptedModel(Protocol):
    """A model that may have adapters. Both raise ModelError."""

    def read_adapter(self, folder: Path) -> LoraFolder:
        """Return an adapter as it was read, whole in memory."""
        ...

    def make_adapter(self, name: str, lora: LoraFolder) -> Adapter:
        """Return one that is ready to be applied."""
        ...


class Adapters:
    """Thread-safe. At most `num_slots` are ready at once, those that requests use and the last that they used."""

    def __init__(self, model: AdaptedModel, num_slots: int | None = None):
        """`num_slots` None: as many as there are."""
        self._model, self._num_slots = model, num_slots
        self._lock = threading.Lock()
        self._copies: dict[str, LoraFolder] = {}  # by name
        self._ready: dict[bytes, Adapter] = {}  # those used longest ago first
        # Without a name, where slots have no bound and none is ever evicted: each as long as requests hold it.
        self._unnamed: WeakValueDictionary[bytes, Adapter] = WeakValueDictionary()
        self._making: dict[bytes, Future[Adapter]] = {}  # each has its slot already
        self._awaited_until: dict[bytes, float] = {}  # of those that no request has taken since, time.monotonic()
        self._retry_at: dict[bytes, float] = {}  # of those that could not be made ready, time.monotonic()
        self._thread = ThreadPoolExecutor(1, "adapters")

    def add(self, name: str, folder: Path) -> bytes:
        """Read an adapter, and give it to requests from now on: a name that is taken stands for this one. Returns its
        identity. Raises ModelError, and then nothing has changed."""
        copy = self._model.read_adapter(folder)
        made = self._model.make_adapter(name, copy)  # which finds what is wrong with it
        with self._lock:
            self._copies[name] = copy
            if self._has_slot and not {copy.identity} & (self._ready.keys() | self._making.keys()):
                self._ready[copy.identity] = self._unnamed.get(copy.identity) or made
            self._let_go()
        return copy.identity

    def remove(self, name: str) -> bool:
        """Take an adapter from new requests; return whether there was one."""
        with self._lock:
            was_here = self._copies.pop(name, None) is not None
            self._let_go()
            return was_here

    def find(self, identity: bytes, in_use: Callable[[], Collection[Adapter]]) -> Adapter:
        """Return the adapter of this identity; `in_use()` gives those that live requests hold. Raises Refusal:
        no_adapter, also for a while after it could not be made ready; adapter_loading, and it is being made ready;
        adapter_slots, all being in use."""
        with self._lock:
            ready, copy = self._ready.get(identity) or self._unnamed.get(identity), self._copy(identity)
            # Of one without a name a leg may yet come, as long as the request that began with it is here.
            if ready is not None and (copy is not None or ready in in_use()):
                if identity in self._ready:
                    self._ready[identity] = self._ready.pop(identity)
                    self._awaited_until.pop(identity, None)
                return ready
            if copy is None or time.monotonic() < self._retry_at.get(identity, 0.0):
                raise Refusal(NO_ADAPTER, retry_after_s=0.0)
            if identity not in self._making:
                if not self._has_slot and not self._evict(in_use()):
                    raise Refusal(ADAPTER_SLOTS, retry_after_s=_RETRY_S)
                self._making[identity] = self._thread.submit(self._make_ready, identity, *copy)
            raise Refusal(ADAPTER_LOADING, retry_after_s=_RETRY_S)

    def wait(self, identity: bytes) -> None:
        """Wait until an adapter that is being made ready is. Raises what making it does."""
        with self._lock:
            making = self._making.get(identity)
        if making is not None:
            making.result()

    @property
    def summary(self) -> str:
        """Return what the engine's start line says of it."""
        with self._lock:
            names, mebibytes = list(self._copies), sum(each.num_bytes for each in self._ready.values()) / (1 << 20)
        slots = "" if self._num_slots is None else f" of {self._num_slots} slots"
        return f"; adapters {', '.join(names)} ({mebibytes:.1f} MiB{slots})" if names else ""

    def listed(self) -> dict[str, bytes]:
        """Return the identity of all that requests may name, by name."""
        with self._lock:
            return {name: copy.identity for name, copy in self._copies.items()}

    @property
    def ready(self) -> list[bytes]:
        """The identities of those in slots, used longest ago first."""
        with self._lock:
            return list(self._ready)

    @property
    def reported_ready(self) -> tuple[bytes, ...]:
        """The identities of those in slots; none where slots have no bound, and each is ready."""
        return () if self._num_slots is None else tuple(self.ready)

    def _copy(self, identity: bytes) -> tuple[str, LoraFolder] | None:
        return next((each for each in self._copies.items() if each[1].identity == identity), None)

    @property
    def _has_slot(self) -> bool:
        return self._num_slots is None or len(self._ready) + len(self._making) < self._num_slots

    def _let_go(self) -> None:
        """Leave those that have lost their last name to the requests that hold them, where slots have no bound."""
        if self._num_slots is None:
            named = {copy.identity for copy in self._copies.values()}
            for identity in self._ready.keys() - named:
                self._unnamed[identity] = self._ready.pop(identity)

    def _evict(self, in_use: Collection[Adapter]) -> bool:
        """Empty the slot of one that nobody uses or waits for, without a name if there is such a one; return whether
        there was any. Where there was none, one that a request waits for is not kept for long: another worker may have
        served that."""
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

    def _make_ready(self, identity: bytes, name: str, copy: LoraFolder) -> Adapter:
        """Make one ready in its slot."""
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
