"""Define the contract of a kernel for one linear weight. A `LinearKernel` owns the arithmetic of one weight form, and
declares whether rows are independent of what shares their batch."""

from abc import ABC, abstractmethod

from torch import Tensor


class LinearKernel(ABC):
    """Hold one weight and map x to y."""

    name: str
    batch_invariant: bool
    row_multiple: int  # the caller pads rows to a multiple, once per step, so that no kernel has to
    scaled_by_row: bool = False  # whether x is rounded with one scale for all inputs of a row

    @abstractmethod
    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        """Return y [T, out_features] of x [T, in_features], both in the compute dtype; y is fp32 for a kernel of
        `partial` sums.

        `largest`: fp32 [T], the largest magnitudes of whole rows that are `scaled_by_row`, if x is a part of them.
        """

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its tensors, resident or mapped."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))
