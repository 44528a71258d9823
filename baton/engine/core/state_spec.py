"""What a layer keeps of a sequence in place of KV: a state of one size, into which every token is folded."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self


class StateSpec(ABC):
    """Sizes of a layer with a state, in elements. A projected row is gates, channels of a short convolution,
    scalars."""

    __slots__ = ()
    taps: int  # tokens that the convolution sees

    @property
    def num_norms(self) -> int:
        """Return the equal parts of a row between the two products that are normed, each by itself; 0: heads are, or
        none."""
        return 0

    @property
    @abstractmethod
    def parts(self) -> tuple[int, int]:
        """Heads, each with a state of its own, and groups of them that share channels of the convolution: as many
        neighbours in each."""

    @abstractmethod
    def part(self, num_heads: int, num_groups: int) -> Self:
        """Return the sizes of a part with so many neighbouring heads, and the groups that they are of."""

    @abstractmethod
    def channels(self, heads: range, groups: range) -> tuple[range, ...]:
        """Return which channels of the convolution are of these heads and of these groups, three runs at most."""

    @property
    @abstractmethod
    def inner_size(self) -> int:
        """Elements of a row between the two products."""

    @property
    @abstractmethod
    def conv_size(self) -> int:
        """Channels of the convolution."""

    @property
    @abstractmethod
    def num_scalars(self) -> int:
        """Elements of a row beside the channels that the recurrence needs."""

    @property
    @abstractmethod
    def recurrence_shape(self) -> tuple[int, ...]:
        """What the recurrence keeps."""

    def first_element(self, head: int) -> int:
        """Return where in what one layer keeps the recurrence of a head begins."""
        return self.tail_elements + head * math.prod(self.recurrence_shape[1:])

    @property
    def projected_size(self) -> int:
        """Elements of a row before the convolution."""
        return self.inner_size + self.conv_size + self.num_scalars

    @property
    def num_selection_weights(self) -> int:
        """Weights of products between the two."""
        return 0

    @property
    def tail_elements(self) -> int:
        """Of the inputs that the convolution still needs."""
        return (self.taps - 1) * self.conv_size

    @property
    def num_elements(self) -> int:
        """Of what one layer keeps, in fp32."""
        return self.tail_elements + math.prod(self.recurrence_shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(StateSpec):
    """Mamba (arXiv 2312.00752) as Jamba has it: each element of a row has a state of its own. Channels are rows; steps,
    what is written and what is read are products of them behind the convolution, normed."""

    num_channels: int
    state_size: int
    step_rank: int  # of the row that steps are made of
    taps: int
    conv_bias: bool = True
    projection_bias: bool = False  # of the products before and behind
    eps: float = 1e-6

    @property
    def parts(self) -> tuple[int, int]:
        return self.num_channels, self.num_channels

    def part(self, num_heads: int, num_groups: int) -> Self:
        return replace(self, num_channels=num_heads)

    def channels(self, heads: range, groups: range) -> tuple[range, ...]:
        return (heads,)

    def first_element(self, head: int) -> int:
        return self.tail_elements + head

    @property
    def inner_size(self) -> int:
        return self.num_channels

    @property
    def conv_size(self) -> int:
        return self.num_channels

    @property
    def num_scalars(self) -> int:
        return 0

    @property
    def recurrence_shape(self) -> tuple[int, ...]:
        return self.state_size, self.num_channels

    @property
    def selected_sizes(self) -> tuple[int, int, int]:
        """Elements that steps are made of, that are written, that are read."""
        return self.step_rank, self.state_size, self.state_size

    @property
    def num_selection_weights(self) -> int:
        return self.num_channels * (sum(self.selected_sizes) + self.step_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(StateSpec):
    """Mamba-2 (arXiv 2405.21060): of each head `head_dim` rows of `state_size`, and a short convolution before it.
    Channels are rows, what they write, what they read; scalars are the steps of heads."""

    num_heads: int
    head_dim: int
    num_groups: int  # of heads, that share what is written and what is read
    state_size: int
    taps: int
    conv_bias: bool = True
    projection_bias: bool = False  # of the products before and behind
    step_limit: tuple[float, float] = (0.0, float("inf"))
    norm_groups: int = 1  # equal parts of the rows behind, each normed by itself; 0: they are not normed
    norm_first: bool = False  # before they are gated
    eps: float = 1e-5

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that contradict each other."""
        if self.num_heads % self.num_groups:
            raise ValueError(f"{self.num_heads} heads of Mamba-2 do not divide into {self.num_groups} groups")
        if self.norm_groups and self.inner_size % self.norm_groups:
            raise ValueError(f"{self.inner_size} elements of Mamba-2 do not divide into {self.norm_groups} norms")

    @property
    def num_norms(self) -> int:
        return self.norm_groups

    @property
    def parts(self) -> tuple[int, int]:
        return self.num_heads, self.num_groups

    def part(self, num_heads: int, num_groups: int) -> Self:
        norm_groups = self.norm_groups and max(1, self.norm_groups * num_heads // self.num_heads)
        return replace(self, num_heads=num_heads, num_groups=num_groups, norm_groups=norm_groups)

    def channels(self, heads: range, groups: range) -> tuple[range, ...]:
        read = self.inner_size + self.num_groups * self.state_size
        shared = (_elements(groups, self.state_size, first) for first in (self.inner_size, read))
        return _elements(heads, self.head_dim), *shared

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def num_scalars(self) -> int:
        return self.num_heads

    @property
    def recurrence_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.head_dim, self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec(StateSpec):
    """Gated delta net (arXiv 2412.06464): of each head a table from keys to values. Channels are queries, keys, values;
    scalars are of each head how much is written and how much is forgotten."""

    num_heads: int  # of values
    num_key_heads: int  # each serves as many neighbouring heads
    key_dim: int  # of a head
    value_dim: int
    taps: int
    eps: float = 1e-6
    is_split: bool = False  # stored are gates, channels and both scalars, in place of what each head of keys serves

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that contradict each other."""
        if self.num_heads % self.num_key_heads:
            raise ValueError(f"{self.num_heads} heads of values do not divide among {self.num_key_heads} of keys")

    @property
    def parts(self) -> tuple[int, int]:
        return self.num_heads, self.num_key_heads

    def part(self, num_heads: int, num_groups: int) -> Self:
        return replace(self, num_heads=num_heads, num_key_heads=num_groups)

    def channels(self, heads: range, groups: range) -> tuple[range, ...]:
        keys = self.num_key_heads * self.key_dim
        shared = (_elements(groups, self.key_dim, first) for first in (0, keys))
        return *shared, _elements(heads, self.value_dim, 2 * keys)

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        return self.inner_size + 2 * self.num_key_heads * self.key_dim

    @property
    def num_scalars(self) -> int:
        return 2 * self.num_heads

    @property
    def recurrence_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.key_dim, self.value_dim


def _elements(heads: range, size: int, first: int = 0) -> range:
    """The elements of neighbouring heads of `size` each, of which the first one begins at `first`."""
    return range(first + heads.start * size, first + heads.stop * size)
