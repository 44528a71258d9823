"""compressed-tensors: pack-quantized (int4, int8), int-quantized (W8A8), float-quantized (FP8), naive-quantized.

Packed integers are in the order of the inputs, low bits first and biased by half their range; zero points are packed
along the outputs. w = scale * (q - zero). Each config group has targets: the class name Linear, names, `re:`
expressions. Of several that fit the most exact one holds, of several expressions the first by the alphabet.
"""

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.weights.formats.base import Format, unpack_int32
from baton.engine.weights.formats.fp8 import read_fp8
from baton.engine.weights.formats.gptq import group_order
from baton.engine.weights.forms import IntWeight, Weight, pack_int4

READ = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
CLASS = "Linear"  # the only class, among those that groups target, whose weights are read
GROUPED = ("group", "channel", "tensor", "block")


class CompressedTensorsFormat(Format):
    """Read folders in the compressed-tensors format."""

    name = "compressed-tensors"

    def __init__(self, tensors, config, dtype):
        super().__init__(tensors, config, dtype)
        schemes = list((config.get("config_groups") or {}).values())
        if not schemes or not all(isinstance(scheme, dict) for scheme in schemes):
            raise self.wrong_config("config_groups is missing or empty")
        self._schemes = {
            target: scheme for scheme in schemes if scheme.get("weights") for target in scheme.get("targets") or ()
        }
        for layout in (config.get("format"), *(scheme.get("format") for scheme in schemes)):
            if layout not in (*READ, "mixed-precision", None):
                raise self.wrong_config(f"format {layout!r} is not supported, one of {', '.join(READ)}")
        if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise self.wrong_config("sparsity_config is not supported")
        if (config.get("transform_config") or {}).get("config_groups"):
            raise self.wrong_config("transform_config is not supported")

    def is_quantized(self, module: str) -> bool:
        return self._scheme(module) is not None and super().is_quantized(module)

    def kind(self, module: str) -> Hashable:
        return str(self._scheme(module)), super().kind(module)

    def marker(self, module: str) -> str:
        return f"{module}.weight_scale"

    def quantized(self, module: str, out_features: int, in_features: int) -> Weight:
        """Read a module by its scheme, [out_features, in_features]. Raises ModelError for a strategy or tensors that
        are not supported."""
        scheme, shape = self._scheme(module), (out_features, in_features)
        weights, activations = scheme["weights"], scheme.get("input_activations")
        if weights.get("strategy") not in GROUPED:
            known = ", ".join(GROUPED)
            raise self.wrong_config(f"strategy {weights.get('strategy')!r} is not supported, one of {known}")
        if weights.get("type", "int") == "float":
            return self._float(module, shape, weights, activations)
        return self._int(module, shape, weights, activations)

    def _scheme(self, module: str) -> dict | None:
        """Return the config group with the most specific target for a module; None if the module is ignored or not
        targeted."""
        if self.is_listed(module, self.config.get("ignore")):
            return None
        for name in self.names_of(module):
            if name in self._schemes:
                return self._schemes[name]
        found = [target for target in self._schemes if target == CLASS or self.is_listed(module, [target])]
        # In the order of compressed_tensors; parts of names, which it does not know, come last.
        found.sort(key=lambda target: (not target.startswith("re:"), target != CLASS, target))
        return self._schemes[found[0]] if found else None

    def _float(self, module: str, shape: tuple[int, int], weights: dict, activations: dict | None) -> Weight:
        if weights.get("num_bits", 8) != 8:
            raise self.wrong_config(f"floats of {weights['num_bits']} bits are not supported, 8 are")
        block = weights.get("block_structure") if weights["strategy"] == "block" else None
        static = f"{module}.input_scale" if activations and not activations.get("dynamic") else None
        weight = read_fp8(self, module, self.marker(module), shape, tuple(block) if block else None, static)
        return weight if activations else replace(weight, activations="none")

    def _int(self, module: str, shape: tuple[int, int], weights: dict, activations: dict | None) -> IntWeight:
        bits, (out_features, in_features) = weights.get("num_bits", 8), shape
        if bits not in (4, 8) or weights["strategy"] == "block":
            raise self.wrong_config(f"integers of {bits} bits by {weights['strategy']} are not supported, 4 and 8 are")
        group = weights["group_size"] if weights["strategy"] == "group" else in_features
        num_groups = self.num_groups(module, in_features, group)
        scales = self._grid(f"{module}.weight_scale", weights, (out_features, num_groups))
        packed = f"{module}.weight_packed" in self.tensors
        offsets = None if weights.get("symmetric", True) else -scales * self._zeros(module, bits, scales.shape, packed)
        values = self._packed(module, shape, bits) if packed else self._plain(module, shape, bits)
        order = None
        if f"{module}.weight_g_idx" in self.tensors and bool((self._groups(module, in_features) >= 0).all()):
            order = group_order(self, f"{module}.weight_g_idx", in_features, group)
            if order is not None:
                values = self._reordered(values, bits, order)
        return IntWeight(bits, values, scales, group, offsets, order, self._activations(activations))

    def _grid(self, name: str, weights: dict, shape: tuple[int, int]) -> Tensor:
        """Return scales as fp32 [out, groups]; a single scale is spread over the rows."""
        if weights["strategy"] == "tensor":
            return self.scales(name, None).reshape(-1)[:1].expand(shape[0], 1).contiguous()
        return self.scales(name, shape)

    def _groups(self, module: str, in_features: int) -> Tensor:
        """Return the group of each input, int32 or int64 [in]; -1 without a stored order."""
        return self.tensors.read(f"{module}.weight_g_idx", (in_features,), (torch.int32, torch.int64))

    def _zeros(self, module: str, bits: int, shape: tuple[int, int], packed: bool) -> Tensor:
        name = f"{module}.weight_zero_point"
        if not packed:
            return self.tensors.read(name, None, (torch.int8,)).reshape(-1, shape[1]).expand(shape).float()
        words = self.tensors.read(name, (-(-shape[0] * bits // 32), shape[1]), (torch.int32,))
        return unpack_int32(words.t(), bits).t()[: shape[0]].float() - 2 ** (bits - 1)

    def _packed(self, module: str, shape: tuple[int, int], bits: int) -> Tensor:
        """Return values as IntWeight stores them: bytes of 4 bits are the same, those of 8 differ by their sign bit."""
        name = f"{module}.weight_packed"
        words = self.tensors.read(name, (shape[0], -(-shape[1] * bits // 32)), (torch.int32,))
        octets = words.view(torch.uint8)[:, : shape[1] * bits // 8]
        return octets.clone() if bits == 4 else (octets ^ 128).view(torch.int8)

    def _plain(self, module: str, shape: tuple[int, int], bits: int) -> Tensor:
        q = self.tensors.read(f"{module}.weight", shape, (torch.int8,))
        return pack_int4(q) if bits == 4 else q

    @staticmethod
    def _reordered(values: Tensor, bits: int, order: Tensor) -> Tensor:
        if bits == 8:
            return values[:, order]
        return pack_int4(torch.stack((values & 15, values >> 4), dim=2).flatten(1)[:, order].to(torch.int8) - 8)

    def _activations(self, activations: dict | None) -> str:
        if not activations:
            return "none"
        if activations.get("num_bits", 8) != 8 or activations.get("type", "int") != "int":
            raise self.wrong_config(f"activations of {activations.get('num_bits')} bits are not supported, 8 are")
        if not activations.get("dynamic"):
            self.note("static int8 activations read as dynamic, per row")
        return "dynamic"
