"""Copy and sum KV at the speed of memory, with native kernels if they could be built."""

import ctypes

import numpy as np

from baton.engine import native

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class NativeMemoryKernels:
    """Implement kvtransfer.memory.blocks.MemoryKernels with native kernels."""

    def __init__(self, library: native.NativeLibrary):
        self._sum = library.function("kv_word_sums", *[_POINTER] * 7, _NUMBER, *[_POINTER] * 3)
        self._copy = library.function("kv_copy_runs", *[_POINTER] * 7, _NUMBER)

    def word_sums(
        self, words: np.ndarray, ids: np.ndarray, table: np.ndarray, starts: np.ndarray, target: np.ndarray | None,
        target_ids: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        out = np.empty((len(ids), words.shape[3], *words.shape[1:3]), np.uint64)
        counts = np.array((len(ids), *words.shape[1:4]), np.int64)
        strides, ids, starts = np.array(words.strides[:4], np.int64), _ids(ids), _ids(starts)
        to = to_ids = to_strides = None
        if target is not None:
            to_ids, to_strides = _ids(target_ids), np.array(target.strides[:4], np.int64)
            to = target.ctypes.data
        self._sum(
            words.ctypes.data, ids.ctypes.data, strides.ctypes.data, to, None if to is None else to_ids.ctypes.data,
            None if to is None else to_strides.ctypes.data, counts.ctypes.data, words.shape[4], table.ctypes.data,
            starts.ctypes.data, out.ctypes.data,
        )  # fmt: skip
        return out

    def copy_runs(self, target: np.ndarray, target_ids: np.ndarray, source: np.ndarray, source_ids: np.ndarray) -> None:
        target_ids, source_ids = _ids(target_ids), _ids(source_ids)
        strides = [np.array(array.strides[:3], np.int64) for array in (source, target)]
        counts = np.array((len(source_ids), *source.shape[1:3]), np.int64)
        self._copy(
            source.ctypes.data, source_ids.ctypes.data, strides[0].ctypes.data, target.ctypes.data,
            target_ids.ctypes.data, strides[1].ctypes.data, counts.ctypes.data, source.shape[3],
        )  # fmt: skip


def memory_kernels() -> NativeMemoryKernels | None:
    """Return the native kernels, or None if there are none, in which case numpy is used."""
    library = native.library()
    return None if library is None else NativeMemoryKernels(library)


def _ids(ids: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(ids, np.int64)
