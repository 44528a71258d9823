"""Encode a row of KV (one token, one head) as bytes, and decode it, in each stored form.

This is the readable reference in plain torch; the native kernels write and read the same bytes.

    fp32 bf16 fp16        a cast
    fp8_e4m3 fp8_e5m2     a cast that saturates at the largest finite value; no scales
    int8                  x = scale * q, q in [-127, 127], scale = max|x| / 127 in fp16
    int4                  x = scale * q + zero, q in [0, 15], scale = (max - min) / 15 and zero = min in fp16;
                          the even element in the low half of a byte

q is rounded, half to even, with the scale as it is stored. Each token and head has its own scale (and zero), so that
writing one token never changes another.
"""

import torch
from torch import Tensor

from kvtransfer.layout import KV_FORMS

STORED: dict[str, torch.dtype] = {name: getattr(torch, form.element) for name, form in KV_FORMS.items()}
HALF_MAX = torch.finfo(torch.float16).max


def encode(form: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode x [..., head_dim] of any float dtype as rows uint8 [..., row_bytes] and scales uint8 [..., scale bytes].

    Raises ValueError for an unknown form, and for int4 with an odd head_dim.
    """
    if form not in STORED:
        raise ValueError(f"kv form {form!r}: one of {', '.join(STORED)}")
    if form == "int4":
        return _encode_int4(x.float())
    if form == "int8":
        return _encode_int8(x.float())
    stored = STORED[form]
    if limit := saturation(form):
        x = x.float().clamp(-limit, limit)
    return _bytes(x.to(stored)), x.new_empty((*x.shape[:-1], 0), dtype=torch.uint8)


def decode(form: str, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode what `encode` returned to [..., head_dim] in `dtype`, computed in fp32 and rounded once.

    `scales` is not read if the form has none. Raises ValueError for an unknown form.
    """
    if form not in STORED:
        raise ValueError(f"kv form {form!r}: one of {', '.join(STORED)}")
    if form == "int8":
        return (rows.view(torch.int8) * _halves(scales)).to(dtype)
    if form == "int4":
        scale, zero = _halves(scales).split(1, dim=-1)
        values = torch.stack((rows & 15, rows >> 4), dim=-1).flatten(-2)
        return torch.addcmul(zero, values.float(), scale).to(dtype)
    return rows.view(STORED[form]).to(dtype)


def saturation(form: str) -> float:
    """Return the largest finite value of an 8-bit float form, or 0 if the form does not saturate."""
    stored = STORED[form]
    return torch.finfo(stored).max if stored.is_floating_point and stored.itemsize == 1 else 0.0


def num_elements(form: str, head_dim: int) -> int:
    """Return how many elements of STORED[form] one row takes."""
    return head_dim * KV_FORMS[form].bits // 8 // STORED[form].itemsize


def _encode_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _half(x.abs().amax(dim=-1, keepdim=True) / 127)
    return _bytes(_rounded(x, scale).clamp(-127, 127).to(torch.int8)), _bytes(scale)


def _encode_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[-1] % 2:
        raise ValueError(f"kv form 'int4': head_dim {x.shape[-1]} is odd")
    low, high = x.aminmax(dim=-1, keepdim=True)
    scale, zero = _half((high - low) / 15), _half(low)
    values = _rounded(x - zero.float(), scale).clamp(0, 15).to(torch.uint8)
    return values[..., 0::2] | values[..., 1::2] << 4, _bytes(torch.cat((scale, zero), dim=-1))


def _half(x: Tensor) -> Tensor:
    return x.clamp(-HALF_MAX, HALF_MAX).half()


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale rounded half to even, or 0 where the scale is 0 (equal values in the row, or too small for
    fp16)."""
    scale = scale.float()
    return torch.where(scale == 0, 0.0, x / scale).round()


def _halves(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.float16).float()


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
