"""Pool the hidden states of a prompt into one vector, chunk by chunk, with the same bits for any size of chunks."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

_LANES = 64  # partial sums of the mean: each adds its rows in order, whatever chunk they arrive in


class Pooling(Enum):
    """How a prompt's rows become one vector. The values are those of the proto."""

    LAST = 1
    MEAN = 2
    CLS = 3  # the first


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What to return for a prompt that is computed and not answered."""

    pooling: Pooling = Pooling.LAST
    normalize: bool = True  # to the length 1
    dimensions: int = 0  # the first elements of the vector to keep; 0: all
    label_token_ids: tuple[int, ...] = ()  # instead of a vector, the log-probabilities of these tokens after the prompt


class Pooler:
    """Pools the rows of one prompt, which are added in order."""

    def __init__(self, params: PoolingParams):
        self.params = params
        self._num_rows = 0
        self._row: Tensor | None = None  # the last or the first one, if that is the vector
        self._lanes: Tensor | None = None  # fp32 [_LANES, hidden_size]

    def add(self, rows: Tensor, begin: int) -> None:
        """Add rows [R, hidden_size] after the final norm, of the tokens from `begin` on. A `begin` of 0 starts anew."""
        if begin == 0:
            self._lanes = None
        self._num_rows = begin + len(rows)
        if self.params.pooling is Pooling.MEAN:
            self._sum(rows.float(), begin)
        elif self.params.pooling is Pooling.LAST:
            self._row = rows[-1].float()
        elif begin == 0:
            self._row = rows[0].float()

    def vector(self) -> list[float]:
        """Return the vector of all rows."""
        vector = self._row if self._lanes is None else self._lanes.sum(dim=0) / self._num_rows
        assert vector is not None, "a prompt has a token"
        vector = vector[: self.params.dimensions or None]
        if self.params.normalize:
            vector = vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)
        return vector.tolist()

    def _sum(self, rows: Tensor, begin: int) -> None:
        if self._lanes is None:
            self._lanes = rows.new_zeros(_LANES, rows.shape[1])
        at = 0
        while at < len(rows):
            lane = (begin + at) % _LANES
            part = rows[at : at + _LANES - lane]
            self._lanes[lane : lane + len(part)] += part
            at += len(part)
