"""Keep adapters in other ranks: each is sent before the first step that uses it, and dropped when it is gone here."""

import itertools
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from baton.engine.core.batch import ForwardBatch

Files = tuple[bytes, bytes]  # config and weights
_LENGTH = struct.Struct("<q")  # of the config, before both


class SentAdapters:
    """Number adapters, as long as they live, and tell the other ranks of them."""

    def __init__(self):
        self._keys: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._unused = itertools.count()
        self._gone: deque[int] = deque()

    def news(self, batch: ForwardBatch) -> Iterator[tuple[int, Tensor]]:
        """Yield what to tell before a step: the number of each new adapter with its files as uint8, and of each that is
        gone, with no data."""
        while self._gone:
            yield self._gone.popleft(), torch.empty(0, dtype=torch.uint8)
        for rows in batch.adapters:
            if rows.adapter not in self._keys:
                key = self._keys[rows.adapter] = next(self._unused)
                weakref.finalize(rows.adapter, self._gone.append, key)
                config, weights = rows.adapter.source.files
                data = bytearray(_LENGTH.pack(len(config)) + config + weights)
                yield key, torch.frombuffer(data, dtype=torch.uint8)

    def numbered(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a step, already told, with numbers instead of its adapters."""
        return _with_adapters(batch, self._keys.__getitem__)


class HeldAdapters:
    """Hold adapters at the receiving end."""

    def __init__(self, make: Callable[[Files], Any]):
        """Hold adapters that `make` makes from their files, for the part of the model here."""
        self._make = make
        self._by_key: dict[int, Any] = {}

    def apply(self, key: int, data: Tensor) -> None:
        """Hold an adapter, or drop it if there is no data."""
        if not len(data):
            del self._by_key[key]
            return
        payload = data.numpy().tobytes()
        begin = _LENGTH.size
        end = begin + _LENGTH.unpack_from(payload)[0]
        self._by_key[key] = self._make((payload[begin:end], payload[end:]))

    def named(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a step with its adapters instead of their numbers."""
        return _with_adapters(batch, self._by_key.__getitem__)


def _with_adapters(batch: ForwardBatch, of: Callable[[Any], Any]) -> ForwardBatch:
    if not batch.adapters:
        return batch
    return replace(batch, adapters=tuple(rows._replace(adapter=of(rows.adapter)) for rows in batch.adapters))
