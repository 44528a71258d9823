"""Describe a pool to the native kernels."""

import ctypes

from baton.engine.kv.pool import KVPool
from kvtransfer.layout import KV_FORMS

FORMS = {form: number for number, form in enumerate(KV_FORMS)}  # the enum `Form` of native/kv.h
HEAD_DIM_MULTIPLE = 16  # a vector


class NativePool(ctypes.Structure):
    """The struct `Pool` of native/kv.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "bytes", "block_bytes", "block_size", "num_layers", "num_kv_heads", "head_dim", "form", "row_bytes",
            "scale_bytes", "num_kinds", "first_head", "heads_of_block",
        )
    ]  # fmt: skip


def native_pool(pool: KVPool) -> NativePool:
    """Return a description that holds the pool's address: the pool must outlive it."""
    group = pool.group
    return NativePool(
        bytes=pool.bytes.data_ptr(),
        block_bytes=pool.layout.block_bytes,
        block_size=group.block_size,
        num_layers=group.num_layers,
        num_kv_heads=len(pool.heads),
        head_dim=group.head_dim,
        form=FORMS[group.form],
        row_bytes=group.row_bytes,
        scale_bytes=group.row_scale_bytes,
        num_kinds=group.num_kinds,
        first_head=pool.heads.start,
        heads_of_block=group.num_kv_heads,
    )
