"""The forms of a linear weight in memory. A format reads into one of them, a kernel applies it.

Every form is [out_features, in_features] and knows its own dequantization, the reference for all kernels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Hold floating-point values."""

    values: Tensor  # [out, in] fp32 | bf16 | fp16

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.values.shape)

    def dequantize(self) -> Tensor:
        """Return fp32 [out, in]."""
        return self.values.float()


@dataclass(frozen=True, slots=True)
class Outliers:
    """Hold input columns that stay in floating point (LLM.int8, arXiv 2208.07339); they are zero in the integer
    part."""

    columns: Tensor  # int64 [C], ascending
    values: Tensor  # bf16 [out, C]


@dataclass(frozen=True, slots=True)
class IntWeight:
    """Integers with a scale (and an offset) per output row and group of inputs:

        w[o, i] = scales[o, i // group] * q[o, i] + offsets[o, i // group]

    q is signed: [-128, 127] at 8 bits, [-8, 7] at 4. `order` gives the input column of each column of q (act-order):
    column j of q multiplies input order[j]; None is the identity.
    """

    bits: int  # 4 | 8
    values: Tensor  # int8 [out, in] at 8 bits; uint8 [out, in // 2] at 4: q + 8, even column in the low half
    scales: Tensor  # fp32 [out, in // group]
    group: int  # inputs per scale; in_features: one scale per row
    offsets: Tensor | None = None  # fp32, shaped as scales; None: symmetric
    order: Tensor | None = None  # int64 [in]
    activations: str = "none"  # "none": not rounded | "dynamic": int8 per row, symmetric, scale = max |x| / 127
    outliers: Outliers | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1] * (8 // self.bits)

    def integers(self) -> Tensor:
        """Return q, int8 [out, in]."""
        if self.bits == 8:
            return self.values
        low, high = self.values & 15, self.values >> 4
        return (torch.stack((low, high), dim=2).flatten(1).to(torch.int8)) - 8

    def dequantize(self) -> Tensor:
        """Return fp32 [out, in], in the model's order of inputs."""
        q = self.integers().float().unflatten(1, (-1, self.group))
        w = q * self.scales.unsqueeze(2)
        if self.offsets is not None:
            w = w + self.offsets.unsqueeze(2)
        w = w.flatten(1)
        if self.order is not None:
            w = torch.empty_like(w).index_copy_(1, self.order, w)
        if self.outliers is not None:
            w[:, self.outliers.columns] = self.outliers.values.float()
        return w


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Hold 8-bit floats with a scale per block of outputs and inputs; [1, 1] scales are per tensor, [out, 1]
    per row."""

    values: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # fp32 [ceil(out / block_out), ceil(in / block_in)]
    block: tuple[int, int]  # (block_out, block_in)
    activations: str = "none"  # none | dynamic (e4m3 per row) | dynamic-block (per row and block_in) | static
    input_scale: float | None = None  # for static activations

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.values.shape)

    def dequantize(self) -> Tensor:
        """Return fp32 [out, in]."""
        rows, columns = self.shape
        spread = self.scales.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[:, :columns]
        return self.values.float() * spread


Weight = DenseWeight | IntWeight | Fp8Weight


def pack_int4(q: Tensor) -> Tensor:
    """Pack int8 [out, in] in [-8, 7] to the stored form, uint8 [out, in // 2]."""
    halves = (q + 8).to(torch.uint8).unflatten(1, (-1, 2))
    return halves[..., 0] | (halves[..., 1] << 4)


def form_name(weight: Weight) -> str:
    """Return a short name: bf16, int8-dynamic, int4-g128, int4-g32-asym, fp8-row-dynamic, fp8-128x128-dynamic-block."""
    if isinstance(weight, DenseWeight):
        return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[weight.values.dtype]
    activations = [] if weight.activations == "none" else [weight.activations]
    if isinstance(weight, Fp8Weight):
        spread = "row" if weight.block[0] == 1 else f"{weight.block[0]}x{weight.block[1]}"
        return "-".join(["fp8", "tensor" if weight.scales.numel() == 1 else spread, *activations])
    group = [f"g{weight.group}"] if weight.group < weight.shape[1] else []
    marks = {"asym": weight.offsets, "order": weight.order, "outliers": weight.outliers}
    given = [mark for mark, value in marks.items() if value is not None]
    return "-".join([f"int{weight.bits}", *group, *given, *activations])
