"""Copy and sum KV at the speed of memory, with native kernels where they could be built."""

import ctypes

import numpy as np

from baton.engine import native
from kvtransfer.memory import blocks, digest

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


def accelerate() -> bool:
    """Let this process copy and sum with the native kernels. Return False where there are none: numpy does it then."""
    library = native.library()
    if library is None:
        return False
    blocks.use_copy_runs(_copying(library))
    digest.use_word_sums(_summing(library))
    return True


def _summing(library: native.NativeLibrary) -> digest.WordSums:
    kernel = library.function("kv_word_sums", *[_POINTER] * 7, _NUMBER, *[_POINTER] * 3)

    def word_sums(
        words: np.ndarray, ids: np.ndarray, table: np.ndarray, starts: np.ndarray, target: np.ndarray | None,
        target_ids: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        """words uint64 [block, row, head, unit, word] at `ids`, weights from table[starts[block]] on -> uint64
        [len(ids), unit, row, head]; with a `target` of the same shape the words are copied to its `target_ids`."""
        out = np.empty((len(ids), words.shape[3], *words.shape[1:3]), np.uint64)
        counts = np.array((len(ids), *words.shape[1:4]), np.int64)
        strides, ids, starts = np.array(words.strides[:4], np.int64), _ids(ids), _ids(starts)
        to = to_ids = to_strides = None
        if target is not None:
            to_ids, to_strides = _ids(target_ids), np.array(target.strides[:4], np.int64)
            to = target.ctypes.data
        kernel(
            words.ctypes.data, ids.ctypes.data, strides.ctypes.data, to, None if to is None else to_ids.ctypes.data,
            None if to is None else to_strides.ctypes.data, counts.ctypes.data, words.shape[4], table.ctypes.data,
            starts.ctypes.data, out.ctypes.data,
        )  # fmt: skip
        return out

    return word_sums


def _copying(library: native.NativeLibrary) -> blocks.CopyRuns:
    kernel = library.function("kv_copy_runs", *[_POINTER] * 7, _NUMBER)

    def copy_runs(target: np.ndarray, target_ids: np.ndarray, source: np.ndarray, source_ids: np.ndarray) -> None:
        """uint8 [block, row, head, bytes], the last axis without gaps: source[source_ids] to target[target_ids]."""
        target_ids, source_ids = _ids(target_ids), _ids(source_ids)
        strides = [np.array(array.strides[:3], np.int64) for array in (source, target)]
        counts = np.array((len(source_ids), *source.shape[1:3]), np.int64)
        kernel(
            source.ctypes.data, source_ids.ctypes.data, strides[0].ctypes.data, target.ctypes.data,
            target_ids.ctypes.data, strides[1].ctypes.data, counts.ctypes.data, source.shape[3],
        )  # fmt: skip

    return copy_runs


def _ids(ids: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(ids, np.int64)
