"""Norms: a row is reduced over its own elements only, in fp32, in an order that its neighbours do not change."""

import torch.nn.functional as F
from torch import Tensor

from baton.engine.core.model_spec import NormSpec


class RMSNorm:
    """Scale the last dimension to a root mean square of one."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self.eps, self._shape = weight, eps, weight.shape[-1:]

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x [..., size] -> the same shape and dtype."""
        return F.rms_norm(x, self._shape, self.weight, self.eps)


class WideNorm:
    """Normalize by RMS or layer norm of any kind, in fp32 up to the result: weights may have an offset or differ by
    head."""

    def __init__(self, spec: NormSpec, weight: Tensor, bias: Tensor | None = None):
        """Normalize with weight [size], or [heads, size] if every head has its own; bias [size]."""
        self.spec, self.weight, self.bias = spec, weight.float() + spec.offset, None if bias is None else bias.float()
        self._shape = weight.shape[-1:]

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x [..., size] -> the same shape and dtype."""
        wide = x.float()
        if self.spec.kind == "rms":
            scaled = F.rms_norm(wide, self._shape, None, self.spec.eps)
        else:
            scaled = F.layer_norm(wide, self._shape, None, None, self.spec.eps)
        scaled = scaled * self.weight
        return (scaled if self.bias is None else scaled + self.bias).to(x.dtype)


Norm = RMSNorm | WideNorm


def make_norm(spec: NormSpec, weight: Tensor, bias: Tensor | None = None) -> Norm:
    """Return the norm of a kind with these parameters."""
    if spec == NormSpec(spec.eps) and weight.dim() == 1:
        return RMSNorm(weight, spec.eps)
    return WideNorm(spec, weight, bias)
