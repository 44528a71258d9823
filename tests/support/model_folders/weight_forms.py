"""Random weights of every form."""

import torch
from torch import Tensor

from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight, Outliers, Weight, pack_int4


def int_weight(
    shape: tuple[int, int],
    bits: int,
    group: int = 0,
    asym: bool = False,
    order: bool = False,
    activations: str = "none",
    num_outliers: int = 0,
    scale_dtype: torch.dtype = torch.float16,
) -> IntWeight:
    """Return a random weight. shape (out, in); group 0: one scale a row."""
    num_out, num_in = shape
    group = group or num_in
    bound = 1 << (bits - 1)
    q = torch.randint(-bound + (bits == 8), bound, shape, dtype=torch.int8)
    outliers = None
    if num_outliers:
        columns = torch.randperm(num_in)[:num_outliers].sort().values
        q[:, columns] = 0
        outliers = Outliers(columns, torch.randn(num_out, num_outliers).bfloat16())
    scales = (torch.rand(num_out, num_in // group) / bound + 0.1 / bound).to(scale_dtype).float()
    offsets = (torch.randn(num_out, num_in // group) / 10).to(scale_dtype).float() if asym else None
    ordered = torch.randperm(num_in) if order else None
    values = q if bits == 8 else pack_int4(q)
    return IntWeight(bits, values, scales, group, offsets, ordered, activations, outliers)


def fp8_weight(shape: tuple[int, int], block: tuple[int, int] | None = None, activations: str = "none") -> Fp8Weight:
    """Return a random weight. shape (out, in); block None: one scale for all."""
    num_out, num_in = shape
    counts = (1, 1) if block is None else (-(-num_out // block[0]), -(-num_in // block[1]))
    values = (torch.randn(shape) / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn)
    input_scale = 0.01 if activations == "static" else None
    return Fp8Weight(values, torch.rand(counts) / 50 + 0.001, block or shape, activations, input_scale)


def dense_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> DenseWeight:
    return DenseWeight((torch.randn(shape) / shape[1] ** 0.5).to(dtype))


# Name -> maker of a weight of that form; `in` is a multiple of 32.
FORMS = {
    "int8-dynamic": lambda shape: int_weight(shape, 8, activations="dynamic"),
    "int8": lambda shape: int_weight(shape, 8),
    "int8-g32": lambda shape: int_weight(shape, 8, 32),
    "int8-g16": lambda shape: int_weight(shape, 8, 16, scale_dtype=torch.float32),
    "int8-g32-dynamic": lambda shape: int_weight(shape, 8, 32, activations="dynamic"),
    "int8-outliers-dynamic": lambda shape: int_weight(shape, 8, activations="dynamic", num_outliers=5),
    "int4": lambda shape: int_weight(shape, 4),
    "int4-g32": lambda shape: int_weight(shape, 4, 32),
    "int4-g32-asym": lambda shape: int_weight(shape, 4, 32, asym=True, scale_dtype=torch.float32),
    "int4-g16-asym-order": lambda shape: int_weight(shape, 4, 16, asym=True, order=True, scale_dtype=torch.bfloat16),
    "int4-g32-dynamic": lambda shape: int_weight(shape, 4, 32, activations="dynamic"),
    "fp8-tensor": lambda shape: fp8_weight(shape),
    "fp8-row-dynamic": lambda shape: fp8_weight(shape, (1, shape[1]), "dynamic"),
    "fp8-32x32-dynamic-block": lambda shape: fp8_weight(shape, (32, 32), "dynamic-block"),
    "fp8-tensor-static": lambda shape: fp8_weight(shape, activations="static"),
}


def reference(weight: Weight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute in fp64, by dequantization."""
    y = x.double() @ weight.dequantize().double().t()
    return y if bias is None else y + bias.double()
