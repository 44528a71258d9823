"""The division of a layer with a state among ranks. Ranks share the state blocks, which have the layout of one rank;
each reads and writes its own part of them."""

import math
from typing import Generic, TypeVar

import torch

from baton.engine.core.state_spec import StateSpec
from baton.engine.parallel.shard import WHOLE, Shard

Spec = TypeVar("Spec", bound=StateSpec)


class StatePart(Generic[Spec]):
    """Describe some heads and what they share with others in their groups. With fewer groups than ranks, several ranks
    have the same group and write equal bytes of it."""

    def __init__(self, whole: Spec, shard: Shard = WHOLE):
        num_heads, num_groups = whole.parts
        self.whole, self.shard = whole, shard
        self.heads, groups = shard.range_of(num_heads), shard.kv_heads(num_groups)
        self.spec: Spec = whole.part(len(self.heads), len(groups))
        self.channel_runs = whole.channels(self.heads, groups)
        self.shares_channels = num_groups < shard.degree

    @property
    def first_element(self) -> int:
        """Return the offset of this part of the recurrence in a layer's state."""
        return self.whole.first_element(self.heads.start)

    @property
    def channels(self) -> torch.Tensor:
        """Return which channels of the convolution are here, int64."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self.channel_runs])

    @property
    def inner(self) -> slice:
        """Return which elements of a row between the two products are here."""
        size = self.whole.inner_size // self.whole.parts[0]
        return slice(self.heads.start * size, self.heads.stop * size)

    @property
    def of_heads(self) -> slice:
        """Return the slice of `heads` for values with one number per head."""
        return slice(self.heads.start, self.heads.stop)

    @property
    def rows(self) -> torch.Tensor:
        """Return which elements of a projected row are here, int64."""
        whole, num_heads = self.whole, self.whole.parts[0]
        gates = torch.arange(self.inner.start, self.inner.stop)
        scalars = torch.arange(whole.num_scalars).view(-1, num_heads)[:, self.of_heads].flatten()
        return torch.cat((gates, whole.inner_size + self.channels, whole.inner_size + whole.conv_size + scalars))

    def span_of(self, num_parts: int) -> int:
        """Return how many neighbouring ranks have something of each of so many equal parts of a row."""
        return max(1, self.shard.degree // math.gcd(num_parts, self.shard.degree))
