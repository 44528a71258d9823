"""Baton's own layout: int8 with the outlier inputs in bf16 (`baton quantize --scheme int8-outlier`, LLM.int8).

weight int8 [out, in] (zero in the outlier columns), weight_scale [out, 1], and, if a module has outliers,
outlier_columns int64 [C] ascending and outlier_weight bf16 [out, C].
"""

import torch
from torch import Tensor

from baton.engine.weights.formats.base import Format
from baton.engine.weights.forms import IntWeight, Outliers

SCHEMES = ("int8-outlier",)


class OutlierFormat(Format):
    """Read folders in Baton's own outlier format."""

    name = "baton"

    def __init__(self, tensors, config, dtype):
        super().__init__(tensors, config, dtype)
        if config.get("scheme") not in SCHEMES:
            raise self.wrong_config(f"scheme {config.get('scheme')!r} is not supported, one of {', '.join(SCHEMES)}")

    def is_quantized(self, module: str) -> bool:
        return not self.is_listed(module, self.config.get("ignore")) and super().is_quantized(module)

    def marker(self, module: str) -> str:
        return f"{module}.weight_scale"

    def quantized(self, module: str, out_features: int, in_features: int) -> IntWeight:
        shape = (out_features, in_features)
        values = self.tensors.read(f"{module}.weight", shape, (torch.int8,))
        scales = self.scales(f"{module}.weight_scale", (out_features, 1))
        outliers = self._outliers(module, shape) if f"{module}.outlier_columns" in self.tensors else None
        return IntWeight(8, values, scales, in_features, activations="dynamic", outliers=outliers)

    def _outliers(self, module: str, shape: tuple[int, int]) -> Outliers:
        name = f"{module}.outlier_columns"
        columns = self.tensors.read(name, None, (torch.int64,))
        if not _ascending_within(columns, shape[1]):
            raise self.wrong(name, f"is not a list of ascending columns below {shape[1]}")
        values = self.tensors.read(f"{module}.outlier_weight", (shape[0], len(columns)), (torch.bfloat16,))
        return Outliers(columns, values)


def _ascending_within(columns: Tensor, limit: int) -> bool:
    if columns.dim() != 1 or not len(columns):
        return False
    return bool(columns[0] >= 0) and bool(columns[-1] < limit) and bool((columns.diff() > 0).all())
