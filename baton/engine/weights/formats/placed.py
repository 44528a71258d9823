"""A source that moves each weight to a device as it is read."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from baton.engine.layers.embedding import Embedding
from baton.engine.weights.formats.base import WeightSource
from baton.engine.weights.forms import DenseWeight, Outliers, Weight

Form = TypeVar("Form")


class PlacedSource(WeightSource):
    """Read everything from `source`, and return it on `device`."""

    def __init__(self, source: WeightSource, device: torch.device):
        super().__init__()
        self.name, self.notes = source.name, source.notes
        self._source, self.device = source, device
        self._read: Callable[[Tensor], Tensor] | None = None  # the embedding as the source returned it

    @property
    def file_bytes(self) -> int:
        return self._source.file_bytes

    @property
    def read_bytes(self) -> int:
        return self._source.read_bytes

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def linear(self, module: str, out_features: int, in_features: int) -> Weight:
        return placed(self._source.linear(module, out_features, in_features), self.device)

    def expert(
        self, name: str, index: int, count: int, out_features: int, in_features: int, inputs_first: bool = False
    ) -> Weight:
        weight = self._source.expert(name, index, count, out_features, in_features, inputs_first)
        return placed(weight, self.device)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return the tensor [*shape] on the device. Raises ModelError as the source does."""
        return self._source.tensor(name, *shape).to(self.device)

    def exact(self, name: str, *shape: int) -> Tensor:
        return self._source.exact(name, *shape).to(self.device)

    def embedding(self, vocab_size: int, hidden_size: int) -> Callable[[Tensor], Tensor]:
        """Return the embedding on the device: int64 [T] -> [T, hidden_size]. A table that its format expands row by row
        on the CPU is expanded as a whole, since a GPU cannot read the file."""
        found = self._read = self._source.embedding(vocab_size, hidden_size)
        table = found.weight if isinstance(found, Embedding) else found(torch.arange(vocab_size))
        return Embedding(table.to(self.device))

    def tied_head(self, embedding: Callable[[Tensor], Tensor], vocab_size: int, hidden_size: int) -> Weight:
        """Return the head [vocab_size, hidden_size] on the device, of the embedding that the source returned last.
        `embedding`: the one on the device, whose memory the head shares if it is the same table."""
        head = self._source.tied_head(self._read, vocab_size, hidden_size)
        if isinstance(head, DenseWeight) and head.values is getattr(self._read, "weight", None):
            return DenseWeight(embedding.weight)
        return placed(head, self.device)

    def check_all_read(self, prefix: str, extra: tuple[str, ...] = ()) -> None:
        self._source.check_all_read(prefix, extra)

    def release(self) -> None:
        self._read = None
        self._source.release()


def placed(form: Form, device: torch.device) -> Form:
    """Return a weight form with all its tensors on the device."""
    moved = {}
    for field in fields(form):
        value = getattr(form, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.to(device)
        elif isinstance(value, Outliers):
            moved[field.name] = placed(value, device)
    return replace(form, **moved)
