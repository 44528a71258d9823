"""Attention in C++ (native/attention/attention.cpp): it reads the pool in place, in any stored form, with all
threads."""

import ctypes
import struct
from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine import native
from baton.engine.attention.base import Attention, AttentionShape
from baton.engine.core.batch import ForwardBatch
from baton.engine.kv.native import HEAD_DIM_MULTIPLE, NativePool, native_pool
from baton.engine.kv.pool import KVPool

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as native/vector.h numbers them
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_SINKS = 4  # index of the pointer in Shape of native/attention/attention.h


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Describe the sequences of a step for the kernel, by four int64 each."""

    batch: ForwardBatch  # kept alive, since the kernel reads its block tables
    seqs: array
    pool: NativePool

    @property
    def address(self) -> int:
        return self.seqs.buffer_info()[0]


class NativeAttention(Attention):
    """Attend by the native kernel, exact for any number of rows and threads."""

    name = "native"
    batch_invariant = True
    skips_outside = True

    def __init__(self, shape: AttentionShape):
        super().__init__(shape)
        library = native.library()
        arguments = (_POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _INT)
        self._attend = library.function("baton_attention", *arguments)
        scales = struct.unpack("2q", struct.pack("2d", shape.given_scale or 0, shape.softcap or 0))
        sign = -1 if shape.chunked else 1
        windows = (sign * (window or 0) for window in shape.windows)
        self.native_shape = array("q", (shape.num_heads, KINDS[shape.dtype], *scales, 0, *windows))
        self._shape_address = self.native_shape.buffer_info()[0]
        self._pool: KVPool | None = None
        self._native_pool = NativePool()

    @classmethod
    def unfit(cls, shape: AttentionShape) -> str:
        if shape.device.type != "cpu":
            return "computes on the CPU"
        if native.library() is None:
            return native.unavailable()
        if shape.head_dim % HEAD_DIM_MULTIPLE:
            return f"head_dim {shape.head_dim} is not a multiple of {HEAD_DIM_MULTIPLE}"
        return ""

    def set_sinks(self, sinks: Tensor) -> None:
        super().set_sinks(sinks)
        self.native_shape[_SINKS] = self.sinks.data_ptr()

    def plan(self, batch: ForwardBatch, pool: KVPool) -> NativePlan:
        if pool is not self._pool:
            self._pool, self._native_pool = pool, native_pool(pool)
        seqs = array("q")
        for seq in batch.seqs:
            seqs.extend((seq.query_start, seq.query_len, seq.kv_len, seq.block_ids.data_ptr()))
        return NativePlan(batch, seqs, self._native_pool)

    def __call__(self, plan: NativePlan, layer: int, q: Tensor, out: Tensor) -> None:
        if q.stride(1) != q.shape[2] or q.stride(2) != 1 or not out.is_contiguous():
            raise ValueError("native attention takes the heads of a token side by side, and a contiguous output")
        self._attend(
            ctypes.addressof(plan.pool), self._shape_address, plan.address, len(plan.batch.seqs), layer,
            q.data_ptr(), q.stride(0), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
