"""Remove tokens from logits by bit masks: in C++ on a host, by tensor operations on a device."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from baton.constraints.grammar import WORD_BITS
from baton.engine import native
from baton.engine.sampling.filters import NEVER


def apply_masks(logits: Tensor, rows: Sequence[int], masks: Sequence[Tensor]) -> None:
    """Set logits fp32 [R, vocab_size] of these rows to -inf for every token whose bit is not set in the row's mask.

    `masks`: int32 [words] on the host, one for each of `rows`.
    """
    if logits.device.type == "cpu" and (call := _native()) is not None and logits.stride(1) == 1:
        vocab_size, pitch, first = logits.shape[1], 4 * logits.stride(0), logits.data_ptr()
        for row, mask in zip(rows, masks, strict=True):
            call(first + row * pitch, mask.data_ptr(), vocab_size)
        return
    words = torch.stack(list(masks))
    where = torch.tensor(rows, dtype=torch.int64, device="cpu")
    if logits.device.type != "cpu":
        words, where = (each.pin_memory().to(logits.device, non_blocking=True) for each in (words, where))
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_out = (words[:, ids // WORD_BITS] >> (ids % WORD_BITS)) & 1 == 0
    logits[where] = logits[where].masked_fill(is_out, NEVER)


@cache
def _native():
    library = native.library()
    if library is None:
        return None
    return library.function("baton_mask_logits", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
