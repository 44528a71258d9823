"""Choose the kernel that applies a weight, and give the reasons against the others."""

import torch
from torch import Tensor

from baton.engine.layers.linear import packed, quantized
from baton.engine.layers.linear.base import LinearKernel
from baton.engine.layers.linear.dense import DenseLinear, FastLinear
from baton.engine.layers.linear.gpu import GpuChoice
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.layers.linear.quantized import QuantizedLinear
from baton.engine.weights.forms import Weight

CPU = torch.device("cpu")
KERNELS = {kernel.name: kernel for kernel in (PackedLinear, QuantizedLinear, DenseLinear, FastLinear)}


class LinearChoice:
    """Make the kernel of every weight of one model, and remember why others were passed over."""

    def __init__(self, name: str, batch_invariant: bool, dtype: torch.dtype):
        """Choose by `name` on a CPU. Raises ValueError if that kernel does not exist, is not available, or cannot be
        exact."""
        if name not in ("auto", *KERNELS):
            raise ValueError(f"linear kernel {name!r}: one of auto, {', '.join(KERNELS)}")
        self._name, self._dtype = name, dtype
        self.reasons: dict[str, str] = {}  # kernel -> why it was passed over
        if batch_invariant:
            self.reasons["fast"] = "rows depend on the size of their batch, refused in batch-invariant mode"
        if packed.unavailable():
            self.reasons["native"] = packed.unavailable()
        if name in self.reasons:
            raise ValueError(f"linear kernel {name!r}: {self.reasons[name]}")

    def __call__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        leaves: int = 1,
        partial: bool = False,
        num_outputs: int = 0,
    ) -> LinearKernel:
        """Return the kernel of weight [out_features, in_features] of any form with bias [out_features]. `leaves` of the
        inputs are summed separately if rows are exact; `partial`: y is fp32, to be added to others. `num_outputs` makes
        no difference on a CPU."""
        chosen = self._choose(weight)
        for other in KERNELS:
            if other != chosen:
                self.reasons.setdefault(other, f"{chosen} was " + ("chosen" if self._name == "auto" else "asked for"))
        return KERNELS[chosen](weight, bias, self._dtype, leaves, partial)

    def _choose(self, weight: Weight) -> str:
        """Return the kernel for `auto`: the native one if it exists, since it reads a weight at the speed of memory
        (bench/cpu.py); else torch's integer products, which read int8 as it is stored."""
        if self._name in ("dense", "fast"):
            return self._name
        if self._name != QuantizedLinear.name:
            why = packed.unfit(weight, self._dtype)
            if not why:
                return "native"
            if self._name == "native":
                raise ValueError(f"linear kernel 'native': {why}")
            self.reasons["native"] = why
        why = quantized.unfit(weight)
        if not why:
            return QuantizedLinear.name
        self.reasons[QuantizedLinear.name] = why
        return "dense" if "fast" in self.reasons else "fast"


def choose(
    name: str, batch_invariant: bool, dtype: torch.dtype, device: torch.device = CPU
) -> tuple[LinearChoice | GpuChoice, dict[str, str]]:
    """Return a maker of kernels, (weight, bias, leaves) -> LinearKernel, that compute in `dtype`, and why each of the
    other kernels was passed over (complete once all weights are made). `name` "auto" lets it choose.

    Raises ValueError if the kernel asked for does not exist, is not available, or cannot be exact in exact mode.
    """
    if device == CPU:
        made = LinearChoice(name, batch_invariant, dtype)
    else:
        made = GpuChoice(name, batch_invariant, dtype, device)
    return made, made.reasons
