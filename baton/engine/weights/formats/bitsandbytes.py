"""bitsandbytes: LLM.int8 rows (SCB) and 4-bit floats (NF4, FP4; arXiv 2305.14314), which are expanded at load.

8 bits: weight int8 [out, in], SCB fp32 [out] = max |row|. 4 bits: weight uint8 [n / 2, 1] of indices into quant_map,
the first of two in the high half; absmax per block, itself quantized with double quantization; quant_state is JSON.
"""

import json

import torch
from torch import Tensor

from baton.engine.weights.formats.base import Format
from baton.engine.weights.forms import DenseWeight, IntWeight, Weight

STATE = "weight.quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
UINT8 = (torch.uint8,)


class BitsAndBytesFormat(Format):
    """Read folders in the bitsandbytes format."""

    name = "bitsandbytes"

    def __init__(self, tensors, config, dtype):
        super().__init__(tensors, config, dtype)
        self._bits = 8 if config.get("load_in_8bit") else 4 if config.get("load_in_4bit") else None
        if self._bits is None:
            raise self.wrong_config("bitsandbytes needs load_in_8bit or load_in_4bit")

    def is_quantized(self, module: str) -> bool:
        return not self.is_listed(module, self.config.get("llm_int8_skip_modules")) and super().is_quantized(module)

    def marker(self, module: str) -> str:
        return f"{module}.SCB" if self._bits == 8 else f"{module}.weight.absmax"

    def quantized(self, module: str, out_features: int, in_features: int) -> Weight:
        if self._bits == 8:
            values = self.tensors.read(f"{module}.weight", (out_features, in_features), (torch.int8,))
            scales = self.scales(f"{module}.SCB", (out_features,)).unsqueeze(1) / 127
            return IntWeight(8, values, scales, in_features)
        return DenseWeight(self._expanded(module, (out_features, in_features)).to(self.dtype))

    def _expanded(self, module: str, shape: tuple[int, int]) -> Tensor:
        """Return a 4-bit weight as fp32 [out, in]."""
        state = self._state(module)
        self.note(f"{state['quant_type']} expanded to dense")
        num_values, block = shape[0] * shape[1], state["blocksize"]
        packed = self.tensors.read(f"{module}.weight", None, UINT8).flatten()
        if packed.numel() * 2 != num_values:
            found = packed.numel() * 2
            raise self.wrong(f"{module}.weight", f"holds {found} values, config.json asks for {list(shape)}")
        levels = self.scales(f"{module}.weight.quant_map", (16,))
        values = levels[torch.stack((packed >> 4, packed & 15), dim=1).flatten().int()]
        absmax = self._absmax(module, state, -(-num_values // block))
        return (values * absmax.repeat_interleave(block)[:num_values]).view(shape)

    def _absmax(self, module: str, state: dict, num_blocks: int) -> Tensor:
        """Return fp32 [num_blocks]; with double quantization they are stored as bytes into nested_quant_map with their
        own scales."""
        name = f"{module}.weight.absmax"
        if "nested_blocksize" not in state:
            return self.scales(name, (num_blocks,))
        levels = self.scales(f"{module}.weight.nested_quant_map", (256,))
        outer = self.scales(f"{module}.weight.nested_absmax", (-(-num_blocks // state["nested_blocksize"]),))
        outer = outer.repeat_interleave(state["nested_blocksize"])[:num_blocks]
        return levels[self.tensors.read(name, (num_blocks,), UINT8).int()] * outer + state["nested_offset"]

    def _state(self, module: str) -> dict:
        for kind in KINDS:
            name = f"{module}.{STATE}{kind}"
            if name in self.tensors:
                try:
                    state = json.loads(bytes(self.tensors.read(name, None, UINT8).tolist()))
                    return state | {"blocksize": int(state["blocksize"])}
                except (ValueError, KeyError, TypeError):
                    raise self.wrong(name, "is not the JSON of a quantization state") from None
        raise self.wrong(f"{module}.{STATE}nf4", "is missing, config.json says load_in_4bit")
