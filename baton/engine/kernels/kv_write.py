"""Normalize and rotate queries and keys, encode and store keys and values, in one pass over the projected heads.

The torch twins are layers/norm.py and layers/rope.py, `encode` of kv/stored_forms.py, and KVPool.write. Here a head
stays in fp32 from the projection to the store. Rows that need neither norm nor rotation are stored exactly as `encode`
stores them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.tiles import narrow, store_row
from baton.engine.kv.pool import KVPool
from baton.engine.kv.stored_forms import saturation


def write_kv(
    heads: Tensor, num_heads: int, positions: Tensor, slots: Tensor, tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None, pool: KVPool, layer: int,
) -> Tensor:  # fmt: skip
    """Write K and V of `layer` to the pool; return the rotated queries [T, num_heads, head_dim].

    heads [T, H + 2 * Hkv, head_dim]: queries, keys, values as projected, the last dimension contiguous. positions,
    slots int64 [T]: a slot below 0 is not written. tables: Rope.signed_tables, fp32. norms: weights of the queries' and
    of the keys' RMSNorm, and its epsilon.
    """
    group = pool.group
    q = torch.empty(len(slots), num_heads, group.head_dim, dtype=heads.dtype, device=heads.device)
    q_weight, k_weight, eps = norms if norms is not None else (heads, heads, 0.0)
    rows = pool.blocks[:, layer]
    scales = pool.scales.view(torch.float16)[:, layer] if pool.scales.shape[-1] else rows
    _write[(len(slots), num_heads + 2 * group.num_kv_heads)](
        heads, q, rows, scales, positions, slots, *tables, q_weight, k_weight, eps,
        heads.stride(0), heads.stride(1), tables[0].stride(0), *rows.stride()[:4], *scales.stride()[:4],
        group.block_size, NUM_HEADS=num_heads, NUM_KV_HEADS=group.num_kv_heads, HEAD_DIM=group.head_dim,
        BLOCK=max(16, triton.next_power_of_2(group.head_dim)) // 2,
        FORM=group.form if group.row_scale_bytes else "cast",
        LIMIT=saturation(group.form),
        NORMED=norms is not None, num_warps=1,
    )  # fmt: skip
    return q


@triton.jit
def _write(
    heads, q, rows, scales, positions, slots, cos, sin, q_weight, k_weight, eps,
    token_stride, head_stride, table_stride, block_stride, side_stride, kv_head_stride, row_stride,
    scale_block_stride, scale_side_stride, scale_head_stride, scale_row_stride, block_size,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    FORM: tl.constexpr, LIMIT: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Process one head. Grid (tokens, queries' + keys' + values' heads). It is held as even and odd elements, BLOCK
    each."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = heads + token * token_stride + head * head_stride
    even = 2 * tl.arange(0, BLOCK)
    mask = even < HEAD_DIM
    low = tl.load(x + even, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x + even + 1, mask=even + 1 < HEAD_DIM, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        position = tl.load(positions + token)
        weight = q_weight if head < NUM_HEADS else k_weight
        inverse = 1.0
        if NORMED:
            inverse = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / HEAD_DIM + eps)
        cos_row, sin_row = cos + position * table_stride, sin + position * table_stride
        low = _rotated(x, weight, inverse, cos_row, sin_row, even, HEAD_DIM, NORMED)
        high = _rotated(x, weight, inverse, cos_row, sin_row, even + 1, HEAD_DIM, NORMED)
    if head < NUM_HEADS:
        place = q + (token * NUM_HEADS + head) * HEAD_DIM + even
        tl.store(place, narrow(low, q.dtype.element_ty), mask=mask)
        tl.store(place + 1, narrow(high, q.dtype.element_ty), mask=even + 1 < HEAD_DIM)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    side = (head - NUM_HEADS) // NUM_KV_HEADS  # 0: a key, 1: a value
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    block, offset = slot // block_size, slot % block_size
    place = rows + block * block_stride + side * side_stride + kv_head * kv_head_stride + offset * row_stride
    scale_place = scales + block * scale_block_stride + side * scale_side_stride
    scale_place += kv_head * scale_head_stride + offset * scale_row_stride
    store_row(place, scale_place, low, high, even, HEAD_DIM, FORM, LIMIT)


@triton.jit
def _rotated(x, weight, inverse, cos, sin, dims, HEAD_DIM: tl.constexpr, NORMED: tl.constexpr):
    """Return elements `dims` of a head after norm and rotation: the first half pairs with the second, sin has
    its sign."""
    mask = dims < HEAD_DIM
    others = (dims + HEAD_DIM // 2) % HEAD_DIM
    value = tl.load(x + dims, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x + others, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        value = value * inverse * tl.load(weight + dims, mask=mask, other=0.0).to(tl.float32)
        other = other * inverse * tl.load(weight + others, mask=mask, other=0.0).to(tl.float32)
    return value * tl.load(cos + dims, mask=mask, other=0.0) + other * tl.load(sin + dims, mask=mask, other=0.0)
