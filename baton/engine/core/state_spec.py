"""What a layer keeps of a sequence in place of KV: a state of one size, into which every token is folded."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Mamba-2 (arXiv 2405.21060): of each head `head_dim` rows of `state_size`, and a short convolution before it."""

    num_heads: int
    head_dim: int
    num_groups: int  # of heads, that share what is written and what is read
    state_size: int
    taps: int  # tokens that the convolution sees
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
    def inner_size(self) -> int:
        """Elements of a row between the two products."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: rows, what they write, what they read."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def num_scalars(self) -> int:
        """Elements of a row beside the channels that the recurrence needs: a step for each head."""
        return self.num_heads

    @property
    def projected_size(self) -> int:
        """Elements of a row before the convolution: gates, channels, steps."""
        return self.inner_size + self.conv_size + self.num_heads

    @property
    def tail_elements(self) -> int:
        """Of the inputs that the convolution still needs."""
        return (self.taps - 1) * self.conv_size

    @property
    def num_elements(self) -> int:
        """Of what one layer keeps, in fp32."""
        return self.tail_elements + self.num_heads * self.head_dim * self.state_size


StateSpec = Mamba2Spec
