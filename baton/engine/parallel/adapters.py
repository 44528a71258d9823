"""Adapters in other ranks: each is told to them before the first step that it adds to, and when it has gone here."""

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
_LENGTH = struct.Struct("<q")  # of the config, in front of both


class SentAdapters:
    """The end that tells: adapters have a number each, as long as they live."""

    def __init__(self):
        self._keys: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._unused = itertools.count()
        self._gone: deque[int] = deque()

    def news(self, batch: ForwardBatch) -> Iterator[tuple[int, Tensor]]:
        """Yield what is to be told before a step: the number of each adapter that is new, with its files as uint8, and
        of each that has gone, with nothing."""
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
        """Return a step that has been told of with numbers in place of its adapters."""
        return _with_adapters(batch, self._keys.__getitem__)


class HeldAdapters:
    """The receiving end."""

    def __init__(self, make: Callable[[Files], Any]):
        """`make`: of its files an adapter of the part of the model that is here."""
        self._make = make
        self._by_key: dict[int, Any] = {}

    def apply(self, key: int, data: Tensor) -> None:
        """Hold an adapter, or let it go where there is no data."""
        if not len(data):
            del self._by_key[key]
            return
        payload = data.numpy().tobytes()
        begin = _LENGTH.size
        end = begin + _LENGTH.unpack_from(payload)[0]
        self._by_key[key] = self._make((payload[begin:end], payload[end:]))

    def named(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a step with its adapters in place of their numbers."""
        return _with_adapters(batch, self._by_key.__getitem__)


def _with_adapters(batch: ForwardBatch, of: Callable[[Any], Any]) -> ForwardBatch:
    if not batch.adapters:
        return batch
    return replace(batch, adapters=tuple(rows._replace(adapter=of(rows.adapter)) for rows in batch.adapters))
