"""Apply a linear weight. A `LinearKernel` owns the arithmetic of one weight form, and declares whether rows are
independent of what shares their batch."""

from abc import ABC, abstractmethod

from torch import Tensor


class LinearKernel(ABC):
    """Parameters of one weight, and x -> y."""

    name: str
    batch_invariant: bool
    row_multiple: int  # rows that the caller pads to, once per step, so that no kernel has to
    scaled_by_row: bool = False  # x is rounded with one scale for all inputs of a row

    @abstractmethod
    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        """x [T, in_features] -> y [T, out_features], both in the compute dtype; y fp32 of a kernel made for `partial`
        sums.

        `largest`: fp32 [T], the largest magnitudes of rows that are `scaled_by_row` and of which x is a part.
        """

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors, resident or mapped."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))
