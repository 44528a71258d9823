"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel store it.

Inputs are packed along the rows of int32, low bits first: qweight [in * bits / 32, out], qzeros [groups,
out * bits / 32], scales [groups, out], g_idx [in]. Version 1 stores zero points one too low, modulo 2 ** bits.
"""

import re

import torch
from torch import Tensor

from baton.engine.weights.formats.base import Format, unpack_int32
from baton.engine.weights.forms import IntWeight, pack_int4


class GPTQFormat(Format):
    """Read folders in the GPTQ format."""

    name = "gptq"

    def __init__(self, tensors, config, dtype):
        super().__init__(tensors, config, dtype)
        self._group, self._sym = config.get("group_size", -1), config.get("sym")
        version = config.get("checkpoint_format") or config.get("format") or "gptq"  # GPTQModel reads either
        if version not in ("gptq", "gptq_v2"):
            raise self.wrong_config(f"checkpoint_format {version!r} is not supported, one of gptq, gptq_v2")
        self._zero_shift = 1 if version == "gptq" else 0
        if config.get("bits") not in (4, 8):
            raise self.wrong_config(f"GPTQ with {config.get('bits')!r} bits is not supported, 4 and 8 are")

    def is_quantized(self, module: str) -> bool:
        inside = self.config.get("modules_in_block_to_quantize") or ()  # names, or lists of names
        inside = [name for names in inside for name in ([names] if isinstance(names, str) else names)]
        if inside and not self.is_listed(module, inside):
            return False
        if self.is_listed(module, self.config.get("modules_to_not_convert")) or self._override(module) is None:
            return False
        return super().is_quantized(module)

    def marker(self, module: str) -> str:
        return f"{module}.qweight"

    def quantized(self, module: str, out_features: int, in_features: int) -> IntWeight:
        """Read a module of 4 or 8 bits, [out_features, in_features]. Raises ModelError if its tensors or the config do
        not fit."""
        override = self._override(module)
        bits, group, sym = override.get("bits", self.config["bits"]), override.get("group_size", self._group), self._sym
        if bits not in (4, 8):
            raise self.wrong_config(f"{module} with {bits} bits is not supported, 4 and 8 are")
        group = in_features if group == -1 else group
        num_groups, half, per_word = self.num_groups(module, in_features, group), 2 ** (bits - 1), 32 // bits
        int32 = (torch.int32,)
        if in_features % per_word or out_features % per_word:
            raise self.wrong(f"{module}.qweight", f"cannot hold {out_features} x {in_features} in words of {per_word}")
        packed = self.tensors.read(f"{module}.qweight", (in_features // per_word, out_features), int32)
        scales = self.scales(f"{module}.scales", (num_groups, out_features)).t().contiguous()
        name = f"{module}.qzeros"
        zeros = unpack_int32(self.tensors.read(name, (num_groups, out_features // per_word), int32), bits)
        zeros = (zeros.int() + self._zero_shift).bitwise_and_(2**bits - 1).t()
        symmetric = bool((zeros == half).all())
        if override.get("sym", sym) and not symmetric:
            raise self.wrong(name, f"has zero points other than {half}, but config.json says sym; is it gptq_v2?")
        q = _along_inputs(packed, bits)
        order = self._order(module, in_features, group)
        if order is not None:
            q = q[:, order]
        q = (q ^ half).view(torch.int8) if bits == 8 else q.view(torch.int8) - half
        offsets = None if symmetric else scales * (half - zeros)
        return IntWeight(bits, pack_int4(q) if bits == 4 else q, scales, group, offsets, order)

    def _override(self, module: str) -> dict | None:
        """Return the entry of GPTQModel's `dynamic` for a module: None if the module is left out, {} without an
        entry."""
        for pattern, values in (self.config.get("dynamic") or {}).items():
            expression = pattern.removeprefix("-:").removeprefix("+:")
            if any(re.match(expression, name) for name in self.names_of(module)):
                return None if pattern.startswith("-:") else values
        return {}

    def _order(self, module: str, in_features: int, group: int) -> Tensor | None:
        """Return the inputs in the order of their groups; None if they are stored in that order."""
        name = f"{module}.g_idx"
        if name not in self.tensors:
            return None
        return group_order(self, name, in_features, group)


def group_order(source: Format, name: str, in_features: int, group: int) -> Tensor | None:
    """Return the order of act-order (desc_act) from the group of each input, int64 [in]: inputs of one group side by
    side; None if they are already. Raises ModelError if a group has another number of inputs."""
    groups = source.tensors.read(name, (in_features,), (torch.int32, torch.int64)).long()
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], torch.arange(in_features) // group):
        raise source.wrong(name, f"does not give each of {in_features // group} groups {group} inputs")
    return None if torch.equal(order, torch.arange(in_features)) else order


def _along_inputs(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [in * bits / 32, out] -> uint8 [out, in]."""
    return unpack_int32(packed.t(), bits)
