"""Arrange weights as the native kernels read them: in panels of 64 outputs (native/linear/linear.h draws the
layouts)."""

import mmap
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight, Weight
from baton.engine.weights.leaves import ROW_BLOCK

PANEL = 64  # outputs
HUGE_PAGE = 2 << 20
MAX_INPUTS = 65536  # 127 * 255 * inputs stays below 2^31: integer sums do not overflow
# Numbered as in linear.h.
U8, U4, BF16, F32, E4M3 = range(5)
AS_THEY_COME, INT8_PER_ROW, INT8_PER_GROUP, E4M3_PER_ROW, E4M3_PER_GROUP, E4M3_STATIC = range(6)
SCALE_KINDS = (torch.float32, torch.bfloat16, torch.float16)
FP8_ACTIVATIONS = {
    "none": AS_THEY_COME,
    "dynamic": E4M3_PER_ROW,
    "dynamic-block": E4M3_PER_GROUP,
    "static": E4M3_STATIC,
}


@dataclass(frozen=True, slots=True)
class Panels:
    """Hold one packed weight. The tensors own the memory that the kernels read."""

    kind: int
    values: Tensor
    num_out: int
    num_in: int
    padded_in: int  # inputs in the panels, padding included
    group: int  # inputs per sum
    groups_per_scale: int = 1
    activations: int = AS_THEY_COME
    scales: Tensor | None = None  # [panels, scales, 64]
    offsets: Tensor | None = None
    order: Tensor | None = None  # int32 [in]
    outlier_columns: Tensor | None = None  # int32 [C]
    outlier_values: Tensor | None = None  # bf16 [panels, C, 64]
    input_scale: float = 0.0

    @property
    def num_bytes(self) -> int:
        held = (self.values, self.scales, self.offsets, self.order, self.outlier_columns, self.outlier_values)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def is_dense(self) -> bool:
        """Return whether the panels hold the weight's own values, so that `rows` returns them."""
        return self.kind in (BF16, F32)

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows of the weight, int64 [T] -> [T, in], if the panels are dense."""
        words = self.values[indices // PANEL, :, indices % PANEL]  # words of four bytes: two bf16 or one fp32
        return words.view(torch.bfloat16 if self.kind == BF16 else torch.float32)[..., : self.num_in]


def unfit_for_panels(weight: Weight, dtype: torch.dtype) -> str:
    """Return why the native kernels cannot apply this weight in this compute dtype; "" if they can."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"computes in fp32 and bf16, not in {dtype}"
    if isinstance(weight, Fp8Weight):
        if dtype != torch.bfloat16 and weight.activations == "none":
            return "fp8 weights are multiplied in bf16"
        if weight.block[1] < weight.shape[1] and weight.block[1] % 2:
            return f"fp8 blocks of {weight.block[1]} inputs"
    if isinstance(weight, IntWeight):
        if weight.shape[1] > MAX_INPUTS:
            return f"integer sums over {weight.shape[1]} inputs could overflow"
        if weight.group < weight.shape[1] and weight.group % 8:
            return f"groups of {weight.group} inputs"
    return ""


def pack(weight: Weight, dtype: torch.dtype, leaves: int = 1) -> Panels:
    """Pack a weight that `unfit_for_panels` accepts; `dtype` is the compute dtype. Sums end at each leaf of its inputs
    (weights/leaves.py)."""
    if isinstance(weight, DenseWeight):
        panels = _pack_dense(weight, dtype)
    else:
        panels = _pack_int(weight) if isinstance(weight, IntWeight) else _pack_fp8(weight)
    if panels.group < panels.padded_in or leaves == 1:
        return panels
    return replace(panels, group=panels.padded_in // leaves, groups_per_scale=leaves)


def _pack_dense(weight: DenseWeight, dtype: torch.dtype) -> Panels:
    rows, columns = weight.shape
    values = weight.values.to(dtype)
    if dtype == torch.float32:
        return Panels(F32, _panels(values, 1), rows, columns, columns, columns)
    padded = columns + columns % 2
    return Panels(BF16, _panels(values, 2), rows, columns, padded, padded)


def _pack_int(weight: IntWeight) -> Panels:
    rows, columns = weight.shape
    whole, dynamic = weight.group == columns, weight.activations == "dynamic"
    step = 4 if weight.bits == 8 else 8
    if whole and not dynamic and columns > ROW_BLOCK:
        step = ROW_BLOCK
    padded = columns + -columns % step
    group = padded if whole else weight.group
    if not dynamic and group % ROW_BLOCK == 0:
        group = ROW_BLOCK
    if weight.bits == 8:
        values = F.pad(weight.values.view(torch.uint8) ^ 128, (0, padded - columns), value=128)
        values = _panels(values, 4)
    else:
        values = _panels(_interleave(F.pad(weight.values, (0, (padded - columns) // 2), value=0x88)), 4)
    scales, offsets = _scales(weight.scales, weight.offsets)
    panels = Panels(
        kind=U8 if weight.bits == 8 else U4,
        values=values,
        num_out=rows,
        num_in=columns,
        padded_in=padded,
        group=group,
        groups_per_scale=(padded if whole else weight.group) // group,
        activations=INT8_PER_ROW if dynamic else INT8_PER_GROUP,
        scales=scales,
        offsets=offsets,
        order=None if weight.order is None else weight.order.to(torch.int32).contiguous(),
    )
    if weight.outliers is None or not weight.outliers.columns.numel():
        return panels
    return replace(
        panels,
        outlier_columns=weight.outliers.columns.to(torch.int32).contiguous(),
        outlier_values=_by_panel(weight.outliers.values.bfloat16()),
    )


def _pack_fp8(weight: Fp8Weight) -> Panels:
    rows, columns = weight.shape
    block_out, block_in = weight.block
    whole = block_in >= columns
    padded = columns + -columns % (2 if whole else block_in)
    values = F.pad(weight.values.view(torch.uint8), (0, padded - columns))
    scales, _ = _scales(weight.scales.repeat_interleave(block_out, 0)[:rows], None)
    return Panels(
        kind=E4M3,
        values=_panels(values, 2),
        num_out=rows,
        num_in=columns,
        padded_in=padded,
        group=padded if whole else block_in,
        activations=FP8_ACTIVATIONS[weight.activations],
        scales=scales,
        input_scale=weight.input_scale or 0.0,
    )


def _panels(values: Tensor, width: int) -> Tensor:
    """Arrange [out, in] -> [panels, in / width, 64, width], with zeros for missing outputs and inputs."""
    values = F.pad(values, (0, -values.shape[1] % width, 0, -values.shape[0] % PANEL))
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[width * values.element_size()]
    by_panel = values.contiguous().view(whole).unflatten(0, (-1, PANEL)).transpose(1, 2)
    return _in_huge_pages(by_panel.shape, whole).copy_(by_panel)


def _in_huge_pages(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return contiguous memory for a weight; from HUGE_PAGE bytes on in huge pages if the system has them. A
    matrix-vector product then reads 31 instead of 23 GB/s on one core (AVX-512 EPYC, int8), since it no longer misses
    the TLB."""
    num_bytes = shape.numel() * dtype.itemsize
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    # Pages that are never written cost nothing.
    held = mmap.mmap(-1, num_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        held.madvise(mmap.MADV_HUGEPAGE)
    begin = -torch.frombuffer(held, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    return torch.frombuffer(held, dtype=dtype, count=shape.numel(), offset=begin).view(shape)


def _interleave(halves: Tensor) -> Tensor:
    """Reorder stored int4 (neighbours share a byte), so that inputs 8i + j and 8i + 4 + j share byte j of four."""
    b0, b1, b2, b3 = halves.unflatten(1, (-1, 4)).unbind(2)
    low, high = 0x0F, 0xF0
    mixed = ((b0 & low) | (b2 << 4), (b0 >> 4) | (b2 & high), (b1 & low) | (b3 << 4), (b1 >> 4) | (b3 & high))
    return torch.stack(mixed, dim=2).flatten(1)


def _by_panel(columns: Tensor) -> Tensor:
    """Arrange [out, C] -> [panels, C, 64]."""
    return F.pad(columns, (0, 0, 0, -columns.shape[0] % PANEL)).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def _scales(scales: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Arrange scales by panel, in two bytes each if that is exact (files mostly store them so)."""
    given = [tensor for tensor in (scales, offsets) if tensor is not None]

    def exact(kind: torch.dtype) -> bool:
        return all(torch.equal(tensor.to(kind).float(), tensor) for tensor in given)

    kind = next((kind for kind in (torch.float16, torch.bfloat16) if exact(kind)), torch.float32)
    packed = [_by_panel(tensor.to(kind)) for tensor in given]
    return packed[0], packed[1] if offsets is not None else None
