"""The order of a sum over all inputs that several devices may share: a tree whose leaves do not depend on the number of
devices.

The inputs of a weight are divided into 8 leaves of equal length (4, 2 or 1 if 8 do not fit). A leaf is summed in fp32
from zero, in its kernel's own order and with its scales; then neighbours are added, then their sums, and so on. With a
power of two of ranks, a rank's part of the inputs consists of whole leaves, and its sum is a branch of the tree: the
branches, added by the same tree, have the bits of one device. The bias is added once, after the tree.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight, Outliers, Weight

MAX_LEAVES = 8
ROW_BLOCK = 128  # inputs that share an activation scale if an integer weight has no groups of its own
VECTOR = 16  # inputs: rows are padded to whole vectors, and a padded leaf would differ from one that is not


def leaves_of(weight: Weight) -> int:
    """Return the number of leaves of a whole weight's inputs: 8, 4, 2 or 1, whole groups each."""
    num_in = weight.shape[1]
    if isinstance(weight, IntWeight) and weight.outliers is not None:
        # Outliers are in the model's order. On a GPU they are a separate product.
        if weight.order is not None or weight.values.is_cuda:
            return 1
    unit = _inputs_per_sum(weight)
    unit = unit if unit % VECTOR == 0 else unit * VECTOR
    leaves = MAX_LEAVES
    while num_in % (leaves * unit) and leaves > 1:
        leaves //= 2
    return leaves


def _inputs_per_sum(weight: Weight) -> int:
    """Return the length of a group of the weight, or of its activations."""
    num_in = weight.shape[1]
    if isinstance(weight, Fp8Weight):
        whole = weight.block[1] >= num_in and weight.activations != "dynamic-block"
        return 1 if whole else weight.block[1]
    if isinstance(weight, IntWeight):
        whole = 1 if weight.activations == "dynamic" else ROW_BLOCK
        return whole if weight.group == num_in else weight.group
    return 1


def combined(parts: Sequence[Tensor]) -> Tensor:
    """Add fp32 sums of leaves or branches by the tree; their number is a power of two."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def inputs_of(weight: Weight, rank: int, degree: int) -> Weight:
    """Return the inputs [rank * in / degree, (rank + 1) * in / degree) of a weight in its form, as stored. If they are
    stored in another order than the model's, `order_of` names the inputs of the part. `degree` divides the leaves of
    the weight."""
    size = weight.shape[1] // degree
    begin = rank * size
    if isinstance(weight, IntWeight):
        return _int_inputs(weight, begin, size)
    values = weight.values[:, begin : begin + size].contiguous()
    if isinstance(weight, DenseWeight):
        return DenseWeight(values)
    return _fp8_inputs(weight, values, begin, size)


def order_of(weight: Weight, rank: int, degree: int) -> Tensor | None:
    """Return which inputs in the model's order, int64, the part from `inputs_of` multiplies; None: its own."""
    if not isinstance(weight, IntWeight) or weight.order is None:
        return None
    size = weight.shape[1] // degree
    return weight.order[rank * size : (rank + 1) * size].long().contiguous()


def _fp8_inputs(weight: Fp8Weight, values: Tensor, begin: int, size: int) -> Fp8Weight:
    block_out, block_in = weight.block
    if block_in >= weight.shape[1]:
        return replace(weight, values=values, block=(block_out, size))
    scales = weight.scales[:, begin // block_in : (begin + size) // block_in].contiguous()
    return replace(weight, values=values, scales=scales)


def _int_inputs(weight: IntWeight, begin: int, size: int) -> IntWeight:
    stored = slice(begin * weight.bits // 8, (begin + size) * weight.bits // 8)
    group, groups = size, slice(None)
    if weight.group < weight.shape[1]:
        group, groups = weight.group, slice(begin // weight.group, (begin + size) // weight.group)
    outliers = weight.outliers
    if outliers is not None:
        inside = (outliers.columns >= begin) & (outliers.columns < begin + size)
        outliers = Outliers(outliers.columns[inside] - begin, outliers.values[:, inside].contiguous())
    return replace(
        weight,
        values=weight.values[:, stored].contiguous(),
        scales=weight.scales[:, groups].contiguous(),
        group=group,
        offsets=None if weight.offsets is None else weight.offsets[:, groups].contiguous(),
        order=None,
        outliers=outliers,
    )
