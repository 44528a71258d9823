"""FP8 (e4m3) weights: `fp8` configs of DeepSeek, Hugging Face and AutoFP8.

weight is fp8 [out, in]; weight_scale_inv or weight_scale is a factor in spite of the first name: one for all, one per
row, or one per block of weight_block_size; input_scale exists if activations are static.
"""

import math

import torch
from torch import Tensor

from baton.engine.weights.formats.base import Format
from baton.engine.weights.forms import Fp8Weight

E4M3 = (torch.float8_e4m3fn,)


class FP8Format(Format):
    """Read folders in the fp8 formats."""

    name = "fp8"

    def __init__(self, tensors, config, dtype):
        super().__init__(tensors, config, dtype)
        if (fmt := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
            raise self.wrong_config(f"fp8 of fmt {fmt!r} is not supported, e4m3 is")
        self._activations = config.get("activation_scheme", "dynamic")
        if self._activations not in ("dynamic", "static"):
            raise self.wrong_config(f"activation_scheme {self._activations!r} is not supported, one of dynamic, static")
        self._block = config.get("weight_block_size")

    def is_quantized(self, module: str) -> bool:
        skipped = [*(self.config.get("modules_to_not_convert") or ()), *(self.config.get("ignored_layers") or ())]
        return not self.is_listed(module, skipped) and super().is_quantized(module)

    def marker(self, module: str) -> str:
        inverse = f"{module}.weight_scale_inv"
        return inverse if inverse in self.tensors else f"{module}.weight_scale"

    def quantized(self, module: str, out_features: int, in_features: int) -> Fp8Weight:
        block = tuple(self._block) if self._block else None
        static = self._input_scale(module) if self._activations == "static" else None
        return read_fp8(self, module, self.marker(module), (out_features, in_features), block, static)

    def _input_scale(self, module: str) -> str:
        for name in ("input_scale", "activation_scale"):
            if f"{module}.{name}" in self.tensors:
                return f"{module}.{name}"
        raise self.wrong(f"{module}.input_scale", "is missing, config.json says that activations are static")


def read_fp8(
    source: Format,
    module: str,
    scale_name: str,
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    static: str | None,
) -> Fp8Weight:
    """Read an fp8 module. block: blocks of scales as the config says; static: the name of the activations' scale, None:
    dynamic."""
    values = source.tensors.read(f"{module}.weight", shape, E4M3)
    scales = source.scales(scale_name, None)
    scales, block = _spread(source, scale_name, scales, shape, block)
    if static is not None:
        return Fp8Weight(values, scales, block, "static", float(source.scales(static, None).max()))
    return Fp8Weight(values, scales, block, "dynamic-block" if block[0] > 1 and block[1] < shape[1] else "dynamic")


def _spread(
    source: Format, name: str, scales: Tensor, shape: tuple[int, int], block: tuple[int, int] | None
) -> tuple[Tensor, tuple[int, int]]:
    """Return scales as a matrix, and the block of each: the whole weight, a row or the config's block."""
    if block is not None:
        if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
            raise source.wrong_config(f"blocks of scales are {list(block)!r:.40}, not two positive integers")
        wanted = (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
    elif scales.numel() == 1:
        wanted, block = (1, 1), shape
    else:
        wanted, block = (shape[0], 1), (1, shape[1])
    if scales.numel() != wanted[0] * wanted[1] or (scales.dim() == 2 and tuple(scales.shape) != wanted):
        raise source.wrong(name, f"has shape {list(scales.shape)}, {list(wanted)} scales are needed")
    return scales.reshape(wanted), block
