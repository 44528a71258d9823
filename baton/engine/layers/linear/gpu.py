"""Choose the kernel that applies a weight on a GPU, and give the reasons against the others."""

import torch
from torch import Tensor

from baton.engine import kernels
from baton.engine.layers.linear.base import LinearKernel
from baton.engine.layers.linear.dense import FastLinear
from baton.engine.weights.forms import DenseWeight, Weight
from baton.engine.weights.on_gpu import unfit_on_gpu

KERNELS = ("triton", "fast")


class GpuChoice:
    """Make the kernel of every weight of one model, and remember why others were passed over."""

    def __init__(self, name: str, batch_invariant: bool, dtype: torch.dtype, device: torch.device):
        """Choose by `name`. Raises ValueError if that kernel does not exist, is not available, or cannot be exact."""
        if name not in ("auto", *KERNELS):
            raise ValueError(f"linear kernel {name!r} on a GPU: one of auto, {', '.join(KERNELS)}")
        self._name, self._exact, self._dtype, self._device = name, batch_invariant, dtype, device
        self.reasons: dict[str, str] = {}  # kernel -> why it was passed over
        if batch_invariant:
            self.reasons["fast"] = "cuBLAS chooses its kernel by the number of rows, refused in batch-invariant mode"
        if missing := kernels.unavailable(device.type):
            self.reasons["triton"] = missing
        if name in self.reasons or len(self.reasons) == len(KERNELS):
            raise ValueError("linear kernel {}: {}".format(name, "; ".join(self.reasons.values())))
        self._table = None

    def __call__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        leaves: int = 1,
        partial: bool = False,
        num_outputs: int = 0,
    ) -> LinearKernel:
        """Return the kernel of weight [out_features, in_features] of any form on the device with bias [out_features].
        `leaves` and `partial` as on a CPU; `num_outputs` as for GpuLinear."""
        if "triton" in self.reasons or self._name == "fast":
            self.reasons.setdefault("triton", f"{self._name} was asked for")
            return FastLinear(weight, bias, self._dtype, partial=partial)
        from baton.engine.layers.linear import triton  # triton is an optional dependency

        if why := unfit_on_gpu(weight, self._dtype):
            weight = DenseWeight(weight.dequantize())
            self.reasons["triton, as it is stored"] = f"{why}: expanded to the compute dtype"
        kernel = triton.GpuLinear(weight, bias, self._dtype, self._exact, leaves, partial, num_outputs)
        self.reasons.setdefault("fast", "is one of the paths of triton, which a measured table chooses from")
        if not self._exact and self._device.type == "cuda":
            self._measured().apply(kernel, self._device, self._dtype)
        return kernel

    def _measured(self):
        from baton.engine.layers.linear.tuning import CudaMeasure, Table, table_path

        if self._table is None:
            name = torch.cuda.get_device_name(self._device)
            self._table = Table(table_path(name), CudaMeasure(self._device))
        return self._table
