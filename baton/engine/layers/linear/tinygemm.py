"""torch's own int4 product (tinygemm, which torchao uses too): w = scale * (level - 8) + zero, scales and zeros in
bf16. It reads a reordered copy of the weight, so it is worth that memory only where it is clearly the fastest."""

import torch
from torch import Tensor

GROUPS = (32, 64, 128, 256)
INNER_TILES = 8  # of 16 inputs each; a thread reads so many together
OUT_MULTIPLE, IN_MULTIPLE = 8, 16 * INNER_TILES


class TinyGemm:
    """Apply one int4 weight by tinygemm."""

    def __init__(self, levels: Tensor, scales: Tensor, offsets: Tensor | None, group: int):
        """Pack levels q + 8, uint8 [out, in], with scales and offsets fp32 [out, in / group]."""
        self._group = group
        self._packed = pack((levels[:, ::2] << 4) | levels[:, 1::2])
        zeros = torch.zeros_like(scales) if offsets is None else offsets
        self._scales = torch.stack((scales.t(), zeros.t()), dim=2).to(torch.bfloat16).contiguous()

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [M, in] bf16 -> [M, out]."""
        return multiply(x, self._packed, self._group, self._scales)


def fits(num_out: int, num_in: int, group: int, dtype: torch.dtype) -> bool:
    """Return whether tinygemm takes a weight of this shape when computing in `dtype`."""
    whole = num_out % OUT_MULTIPLE == 0 and num_in % IN_MULTIPLE == 0
    return whole and group in GROUPS and dtype == torch.bfloat16


def pack(levels: Tensor) -> Tensor:
    """Reorder uint8 [out, in / 2], the even column in the high half, for `multiply`."""
    return torch._convert_weight_to_int4pack(levels.contiguous(), INNER_TILES)


def multiply(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    """Multiply x by the packed weight; scales bf16 [in / group, out, 2] hold scale and zero."""
    return torch._weight_int4pack_mm(x, packed, group, scales)
