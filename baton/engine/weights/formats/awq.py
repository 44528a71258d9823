"""AWQ (arXiv 2306.00978) as AutoAWQ stores it, version "gemm".

Outputs are packed along the columns of int32, eight at a time in the order ORDER: qweight [in, out / 8],
qzeros [groups, out / 8], scales [groups, out]; w = scale * (u - zero).
"""

import torch
from torch import Tensor

from baton.engine.weights.formats.base import Format, unpack_int32
from baton.engine.weights.forms import IntWeight, pack_int4

BITS, PER_WORD, HALF = 4, 8, 8
OF_ACTIVATION = ".act.scales"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble j of a word, low bits first, holds output ORDER[j]


class AWQFormat(Format):
    """Read folders in the AWQ format."""

    name = "awq"

    def __init__(self, tensors, config, dtype):
        super().__init__(tensors, config, dtype)
        version = str(config.get("version") or "gemm").lower()
        if version != "gemm":
            raise self.wrong_config(f"AWQ version {version!r} is not supported, gemm is")
        if (bits := config.get("bits", config.get("w_bit"))) != BITS:
            raise self.wrong_config(f"AWQ with {bits!r} bits is not supported, 4 is")
        self._group = config.get("group_size", config.get("q_group_size", 128))

    def is_quantized(self, module: str) -> bool:
        return not self.is_listed(module, self.config.get("modules_to_not_convert")) and super().is_quantized(module)

    def marker(self, module: str) -> str:
        return f"{module}.qweight"

    def check_all_read(self, prefix: str, extra: tuple[str, ...] = ()) -> None:
        """Raise as other formats do, and ModelError if an activation below `prefix` has its own scales: without them
        the linear after it would read other numbers than it was quantized for."""
        for name in self.tensors.unread():
            if name.startswith(prefix) and name.endswith(OF_ACTIVATION):
                raise self.wrong(name, "divides what an activation says (AutoAWQ), which is not supported")
        super().check_all_read(prefix, extra)

    def quantized(self, module: str, out_features: int, in_features: int) -> IntWeight:
        """Read a module of 4-bit words, [out_features, in_features]. Raises ModelError if its tensors do not fit."""
        group = in_features if self._group == -1 else self._group
        num_groups = self.num_groups(module, in_features, group)
        if out_features % PER_WORD:
            raise self.wrong(f"{module}.qweight", f"cannot hold {out_features} outputs in words of {PER_WORD}")
        words, int32 = out_features // PER_WORD, (torch.int32,)
        q = _along_outputs(self.tensors.read(f"{module}.qweight", (in_features, words), int32)).t()
        zeros = _along_outputs(self.tensors.read(f"{module}.qzeros", (num_groups, words), int32)).t()
        scales = self.scales(f"{module}.scales", (num_groups, out_features)).t().contiguous()
        symmetric = bool((zeros == HALF).all())
        offsets = None if symmetric else scales * (HALF - zeros.float())
        return IntWeight(BITS, pack_int4(q.to(torch.int8) - HALF), scales, group, offsets)


def _along_outputs(packed: Tensor) -> Tensor:
    """Unpack int32 [rows, out / 8] -> uint8 [rows, out]."""
    return unpack_int32(packed, BITS).unflatten(1, (-1, PER_WORD))[:, :, torch.argsort(torch.tensor(ORDER))].flatten(1)
