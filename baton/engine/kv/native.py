"""A pool as the native kernels take it."""

import ctypes

from baton.engine.kv.pool import KVPool
from kvtransfer.layout import KV_FORMS

FORMS = {form: number for number, form in enumerate(KV_FORMS)}  # `Form` of native/kv.h
HEAD_DIM_MULTIPLE = 16  # a vector


class NativePool(ctypes.Structure):
    """`Pool` of native/kv.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "bytes", "block_bytes", "block_size", "num_layers", "num_kv_heads", "head_dim", "form", "row_bytes",
            "scale_bytes", "num_kinds", "first_head", "heads_of_block",
        )
    ]  # fmt: skip


def native_pool(pool: KVPool) -> NativePool:
    """Holds an address: the pool must live as long as what is made of it."""
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
