"""MXFP4, in which gpt-oss stores its experts (OCP Microscaling Formats 1.0): e2m1 values, two in a byte, with the even
input in the low half; every 32 inputs of an output share a power of two.

An e2m1 value is a multiple of 1/2 up to 6, so a weight is read without loss as int8 with a scale for 32 inputs.
"""

import torch

from baton.engine.weights.formats.base import Format
from baton.engine.weights.forms import IntWeight, Weight

GROUP = 32  # inputs that share a scale
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # twice each magnitude of e2m1; the highest bit is the sign
BIAS = 127  # of a stored exponent
NAN = 255


class Mxfp4Format(Format):
    """Read a folder in which only experts are quantized: `NAME_blocks` uint8 [experts, out, in / 32, 16], `NAME_scales`
    uint8 [experts, out, in / 32]."""

    name = "mxfp4"

    def expert(
        self, name: str, index: int, count: int, out_features: int, in_features: int, inputs_first: bool = False
    ) -> Weight:
        """Return the weight [out_features, in_features] of one expert. Blocks have outputs first, whatever the order of
        the tensors that they replace. Raises ModelError if tensors are missing or do not fit, or scales are NaN."""
        scales_name, num_groups = f"{name}_scales", self.num_groups(name, in_features, GROUP)
        octets = (torch.uint8,)
        blocks = self.tensors.slice(f"{name}_blocks", index, (count, out_features, num_groups, GROUP // 2), octets)
        exponents = self.tensors.slice(scales_name, index, (count, out_features, num_groups), octets)
        if bool((exponents == NAN).any()):
            raise self.wrong(scales_name, "holds scales that are NaN")
        levels = torch.tensor([*DOUBLED, *(-level for level in DOUBLED)], dtype=torch.int8)
        halves = torch.stack((blocks & 15, blocks >> 4), dim=3)
        values = levels[halves.flatten().int()].view(out_features, in_features)
        scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - BIAS - 1)  # for doubled values
        return IntWeight(8, values, scales, GROUP)

    def is_quantized(self, module: str) -> bool:
        return False

    def marker(self, module: str) -> str:
        return f"{module}_blocks"

    def quantized(self, module: str, out_features: int, in_features: int) -> Weight:
        raise self.wrong(self.marker(module), "is MXFP4, which is read of experts alone")
