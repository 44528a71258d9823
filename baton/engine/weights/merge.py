"""Merge weights that share their input, take some rows of a weight, and pad it with zero rows and columns."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight, Weight


def merge(parts: Sequence[Weight]) -> list[Weight]:
    """Return the parts one above the other, with neighbours of the same form merged; a single entry if all are."""
    merged = [parts[0]]
    for part in parts[1:]:
        if _agree(merged[-1], part):
            merged[-1] = _above(merged[-1], part)
        else:
            merged.append(part)
    return merged


def pad(weight: Weight, rows: int = 0, columns: int = 0) -> Weight:
    """Return a weight with rows of zeros below and columns to the right, whose values do not matter since they meet
    inputs of zero.

    Columns that do not fill whole groups turn a grouped weight into a dense one.
    """
    if not rows and not columns:
        return weight
    if isinstance(weight, DenseWeight):
        return DenseWeight(F.pad(weight.values, (0, columns, 0, rows)))
    if isinstance(weight, Fp8Weight):
        return _pad_fp8(weight, rows, columns)
    return _pad_int(weight, rows, columns)


def take_rows(weight: Weight, rows: Tensor) -> Weight:
    """Return rows of a weight in the order of `rows`, int64 [R], in its form."""
    values = weight.values.view(torch.uint8) if isinstance(weight, Fp8Weight) else weight.values
    values = values[rows]
    if isinstance(weight, DenseWeight):
        return DenseWeight(values)
    if isinstance(weight, Fp8Weight):
        if weight.scales.shape[0] == 1:
            scales, height = weight.scales, len(rows)
        else:
            scales, height = weight.scales.repeat_interleave(weight.block[0], 0)[rows], 1
        return replace(weight, values=values.view(weight.values.dtype), scales=scales, block=(height, weight.block[1]))
    offsets, outliers = weight.offsets, weight.outliers
    if outliers is not None:
        outliers = replace(outliers, values=outliers.values[rows])
    return replace(
        weight, values=values, scales=weight.scales[rows], offsets=None if offsets is None else offsets[rows],
        outliers=outliers,
    )  # fmt: skip


def split_rows(weight: Weight, parts: int) -> list[Weight]:
    """Return the parts, of equal size, that lie one above the other."""
    if parts == 1:
        return [weight]
    return [take_rows(weight, rows) for rows in torch.arange(weight.shape[0], device=weight.values.device).chunk(parts)]


def _agree(one: Weight, other: Weight) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, DenseWeight):
        return one.values.dtype == other.values.dtype
    if one.activations != other.activations:
        return False
    if isinstance(one, Fp8Weight):
        per_tensor = one.scales.numel() == 1 or other.scales.numel() == 1
        whole = one.shape[0] % one.block[0] == 0
        return one.block == other.block and whole and not per_tensor and one.input_scale == other.input_scale
    kinds = [(w.bits, w.group, w.offsets is None) for w in (one, other)]
    columns = [None if w.outliers is None else w.outliers.columns for w in (one, other)]
    return kinds[0] == kinds[1] and _same(one.order, other.order) and _same(*columns)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _above(one: Weight, other: Weight) -> Weight:
    values = torch.cat((one.values, other.values))
    if isinstance(one, DenseWeight):
        return DenseWeight(values)
    scales = torch.cat((one.scales, other.scales))
    if isinstance(one, Fp8Weight):
        return replace(one, values=values, scales=scales)
    offsets = None if one.offsets is None else torch.cat((one.offsets, other.offsets))
    outliers = one.outliers
    if outliers is not None:
        outliers = replace(outliers, values=torch.cat((outliers.values, other.outliers.values)))
    return replace(one, values=values, scales=scales, offsets=offsets, outliers=outliers)


def _pad_fp8(weight: Fp8Weight, rows: int, columns: int) -> Fp8Weight:
    (num_rows, num_columns), (block_out, block_in) = weight.shape, weight.block
    # A block as large as the weight covers the padding too; other blocks need scales for it.
    block_out = block_out + rows if block_out == num_rows and num_rows > 1 else block_out
    block_in = block_in + columns if block_in == num_columns else block_in
    wanted = (-(-(num_rows + rows) // block_out), -(-(num_columns + columns) // block_in))
    missing = [size - have for size, have in zip(wanted, weight.scales.shape, strict=True)]
    scales = F.pad(weight.scales, (0, missing[1], 0, missing[0]), value=1.0)
    values = F.pad(weight.values.view(torch.uint8), (0, columns, 0, rows)).view(weight.values.dtype)
    return replace(weight, values=values, scales=scales, block=(block_out, block_in))


def _pad_int(weight: IntWeight, rows: int, columns: int) -> Weight:
    group, in_features = weight.group, weight.shape[1]
    if columns and group == in_features and (weight.bits == 8 or columns % 2 == 0):
        group += columns  # still one scale per row
    elif columns % group:
        return DenseWeight(F.pad(weight.dequantize(), (0, columns, 0, rows)))
    zero = 0 if weight.bits == 8 else 0x88  # q = 0 in both halves
    values = F.pad(weight.values, (0, columns * weight.bits // 8, 0, rows), value=zero)
    new_groups = (in_features + columns) // group - weight.scales.shape[1]
    scales, offsets = (
        None if x is None else F.pad(x, (0, new_groups, 0, rows)) for x in (weight.scales, weight.offsets)
    )
    order = weight.order
    if order is not None and columns:
        order = torch.cat((order, torch.arange(in_features, in_features + columns, device=order.device)))
    outliers = weight.outliers
    if outliers is not None and rows:
        outliers = replace(outliers, values=F.pad(outliers.values, (0, 0, 0, rows)))
    return replace(weight, values=values, scales=scales, group=group, offsets=offsets, order=order, outliers=outliers)
