"""A linear weight of which every rank has some of the inputs."""

from torch import Tensor

from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.parallel.collectives import Collectives


class RowParallelLinear(LinearKernel):
    """The sum of what the ranks' parts of a weight put out, and then the bias. All ranks call it together."""

    def __init__(self, part: LinearKernel, bias: Tensor | None, order: Tensor | None, collectives: Collectives):
        """`part`: of this rank's inputs, without bias, y in fp32, or rounded where sums are fast; `order`: int64,
        which of the inputs of all ranks they are; None: those that this rank is called with."""
        self.part, self.order, self._collectives = part, order, collectives
        self.bias = None if bias is None else bias.float().contiguous()
        self.name, self.batch_invariant, self.row_multiple = part.name, part.batch_invariant, part.row_multiple

    @property
    def num_bytes(self) -> int:
        return self.part.num_bytes + sum(value.nbytes for value in (self.bias, self.order) if value is not None)

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        """x [T, inputs of this rank] -> [T, out_features] on every rank."""
        if self.order is not None:
            x = self.inputs_of_all(x)[:, self.order]
        if self.part.scaled_by_row and not self._collectives.fast:
            largest = self._of_all(self._largest(x)).amax(dim=0)
        return self._collectives.sum(self.part(x, largest), x.dtype, self.bias)

    @property
    def unfit_for_groups(self) -> str:
        """Return what ranks do for this weight alone besides adding what their parts put out; "": nothing."""
        if self.order is not None:
            return "inputs of all ranks cross first"
        if self.part.scaled_by_row and not self._collectives.fast:
            return "rows are rounded by the largest input of all ranks"
        return "" if self.bias is None else "a bias is added to the sum of all ranks"

    def inputs_of_all(self, x: Tensor) -> Tensor:
        """Return the inputs of all ranks, one after the other, [T, in_features]."""
        return self._of_all(x).transpose(0, 1).flatten(1)

    def _of_all(self, own: Tensor) -> Tensor:
        gathered = self._collectives.gather(own)
        assert gathered is not None
        return gathered

    def _largest(self, x: Tensor) -> Tensor:
        """Return the largest magnitudes of rows, fp32 [T], outliers of the weight aside."""
        columns = self.part.panels.outlier_columns if isinstance(self.part, PackedLinear) else None
        magnitudes = x.float().abs()
        if columns is not None:
            magnitudes[:, columns.long()] = 0
        return magnitudes.amax(dim=1)
