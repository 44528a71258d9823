"""A linear weight whose inputs are divided among ranks."""

from torch import Tensor

from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.parallel.collectives import Collectives


class RowParallelLinear(LinearKernel):
    """Add the ranks' partial outputs of a weight, then the bias. All ranks call it together."""

    def __init__(self, part: LinearKernel, bias: Tensor | None, order: Tensor | None, collectives: Collectives):
        """Hold `part`, the weight for this rank's inputs, without bias, whose y is fp32, or rounded in fast mode;
        `order`: int64, which inputs of all ranks these are; None: those that this rank is called with."""
        self.part, self.order, self._collectives = part, order, collectives
        self.bias = None if bias is None else bias.float().contiguous()
        self.name, self.batch_invariant, self.row_multiple = part.name, part.batch_invariant, part.row_multiple

    @property
    def num_bytes(self) -> int:
        return self.part.num_bytes + sum(value.nbytes for value in (self.bias, self.order) if value is not None)

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        """Return [T, out_features] on every rank, of x [T, inputs of this rank]."""
        if self.order is not None:
            x = self.inputs_of_all(x)[:, self.order]
        if self.part.scaled_by_row and not self._collectives.fast:
            largest = self._of_all(self._largest(x)).amax(dim=0)
        return self._collectives.sum(self.part(x, largest), x.dtype, self.bias)

    @property
    def unfit_for_groups(self) -> str:
        """Return what ranks do for this weight besides adding their outputs; "" if nothing."""
        if self.order is not None:
            return "inputs of all ranks cross first"
        if self.part.scaled_by_row and not self._collectives.fast:
            return "rows are rounded by the largest input of all ranks"
        return "" if self.bias is None else "a bias is added to the sum of all ranks"

    def inputs_of_all(self, x: Tensor) -> Tensor:
        """Gather the inputs of all ranks, one after the other, [T, in_features]."""
        return self._of_all(x).transpose(0, 1).flatten(1)

    def _of_all(self, own: Tensor) -> Tensor:
        gathered = self._collectives.gather(own)
        assert gathered is not None
        return gathered

    def _largest(self, x: Tensor) -> Tensor:
        """Return the largest magnitudes of whole rows, fp32 [T], without the weight's outliers."""
        columns = self.part.panels.outlier_columns if isinstance(self.part, PackedLinear) else None
        magnitudes = x.float().abs()
        if columns is not None:
            magnitudes[:, columns.long()] = 0
        return magnitudes.amax(dim=1)
