"""Describe the recurrent state of a layer: of a fixed size, and every token is folded into it."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self


class StateSpec(ABC):
    """The sizes of a layer with a state, in elements. A projected row has gates, channels of a short convolution,
    scalars."""

    __slots__ = ()
    taps: int  # tokens that the convolution covers

    @property
    def num_norms(self) -> int:
        """How many equal parts of a row are normed separately before the output product; 0: heads are, or nothing
        is."""
        return 0

    @property
    @abstractmethod
    def parts(self) -> tuple[int, int]:
        """The number of heads, each with a state, and of equal groups of neighbouring heads that share channels."""

    @abstractmethod
    def part(self, num_heads: int, num_groups: int) -> Self:
        """Return the sizes of a part of the layer with so many neighbouring heads in so many groups."""

    @abstractmethod
    def channels(self, heads: range, groups: range) -> tuple[range, ...]:
        """Return the channels of the convolution that belong to these heads and groups, in at most three runs."""

    @property
    @abstractmethod
    def inner_size(self) -> int:
        """The elements of a row between the input and the output product."""

    @property
    @abstractmethod
    def conv_size(self) -> int:
        """The channels of the convolution."""

    @property
    @abstractmethod
    def num_scalars(self) -> int:
        """The elements of a row that the recurrence needs beside the channels."""

    @property
    @abstractmethod
    def recurrence_shape(self) -> tuple[int, ...]:
        """The shape of the state of the recurrence."""

    def first_element(self, head: int) -> int:
        """Return the index in a layer's state at which the recurrence of a head begins."""
        return self.tail_elements + head * math.prod(self.recurrence_shape[1:])

    @property
    def projected_size(self) -> int:
        """The elements of a row before the convolution."""
        return self.inner_size + self.conv_size + self.num_scalars

    @property
    def num_selection_weights(self) -> int:
        """The weights of products between the input and the output product."""
        return 0

    @property
    def tail_elements(self) -> int:
        """The elements of the inputs that the convolution still needs."""
        return (self.taps - 1) * self.conv_size

    @property
    def num_elements(self) -> int:
        """The elements of one layer's state, in fp32."""
        return self.tail_elements + math.prod(self.recurrence_shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(StateSpec):
    """Mamba (arXiv 2312.00752) as in Jamba: each element of a row has a state of its own.

    Channels are rows. Steps, writes and reads are products of the channels after the convolution, normed.
    """

    num_channels: int
    state_size: int
    step_rank: int  # size of the row that steps are made of
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
        """The elements that steps are made of, that are written, and that are read."""
        return self.step_rank, self.state_size, self.state_size

    @property
    def num_selection_weights(self) -> int:
        return self.num_channels * (sum(self.selected_sizes) + self.step_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(StateSpec):
    """Mamba-2 (arXiv 2405.21060): each head has `head_dim` rows of `state_size`, after a short convolution.

    Channels are rows, writes and reads; scalars are the steps of heads.
    """

    num_heads: int
    head_dim: int
    num_groups: int  # groups of heads that share writes and reads
    state_size: int
    taps: int
    conv_bias: bool = True
    projection_bias: bool = False  # of the products before and behind
    step_limit: tuple[float, float] = (0.0, float("inf"))
    norm_groups: int = 1  # equal parts of the output rows, each normed separately; 0: not normed
    norm_first: bool = False  # normed before they are gated
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
    """Gated delta net (arXiv 2412.06464): each head has a table from keys to values.

    Channels are queries, keys and values; scalars say for each head how much is written and how much is forgotten.
    """

    num_heads: int  # of values
    num_key_heads: int  # each serves an equal number of neighbouring heads of values
    key_dim: int  # of a head
    value_dim: int
    taps: int
    eps: float = 1e-6
    is_split: bool = False  # the weights are stored by gates, channels and scalars, not by heads of keys

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
    """Return the elements of neighbouring heads of `size` each, when head 0 begins at `first`."""
    return range(first + heads.start * size, first + heads.stop * size)
