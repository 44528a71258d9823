"""Round activations as a weight's form says, in torch; native kernels do the same while they read a row."""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.weights.round import FP8_MAX


def rounded_to_e4m3(
    x: Tensor, activations: str, block_in: int, input_scale: float | None, largest: Tensor | None = None
) -> Tensor:
    """Round x [T, in] to e4m3 by the scales of a form (dynamic, dynamic-block, static); return it in the dtype of x.
    `largest` [T]: the magnitude of each whole row, if x is a part of it."""
    values = x.float()
    if activations == "dynamic-block":
        num_in = x.shape[1]
        values = F.pad(values, (0, -num_in % block_in)).unflatten(1, (-1, block_in))
        return _through_e4m3(values, None).flatten(1)[:, :num_in].to(x.dtype)
    if activations == "static":
        return _through_e4m3(values, input_scale).to(x.dtype)
    return _through_e4m3(values, None if largest is None else _scales(largest.unsqueeze(1))).to(x.dtype)


def _scales(largest: Tensor) -> Tensor:
    return (largest / FP8_MAX).clamp_(min=1e-12)


def _through_e4m3(values: Tensor, scale: float | Tensor | None) -> Tensor:
    scales = scale if scale is not None else _scales(values.abs().amax(dim=-1, keepdim=True))
    return (values / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scales
