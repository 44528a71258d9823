"""Draw tokens on a CPU by native/sampling/draw.cpp, in one call for all rows of a step.

It draws the same tokens as sampler.py, which computes the log-probabilities of rows that ask for them here too.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine import native
from baton.engine.sampling.filters import probability_limits
from baton.engine.sampling.penalties import changed_tokens, changes, penalties
from baton.engine.sampling.sampler import Sampled, Sampler, SampleRow, token_logprobs

SEEN = 1 << 30  # as in native/sampling/draw.h
NO_CHANGES = np.empty(0, np.int32)
_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class NativeRow(ctypes.Structure):
    """The struct `SampleRow` of native/sampling/draw.h."""

    _fields_ = [
        *(
            (name, _DOUBLE)
            for name in ("temperature", "kept_mass", "least_ratio", "repetition", "presence", "frequency")
        ),
        ("top_k", _INT),
        ("seed", ctypes.c_uint64),
        ("choice", _INT),
        ("position", _INT),
        ("changes", _POINTER),
        ("num_changes", _INT),
        ("mask", _POINTER),
    ]


def changes_of(row: SampleRow) -> np.ndarray:
    """Return the tokens whose logits change, as `changed_tokens` does, int32 [3 * tokens]."""
    if not changes(row.params, row.min_tokens_left_bans):
        return NO_CHANGES
    return changed_tokens(row.params, row.prompt_ids, row.output_ids, row.min_tokens_left_bans, SEEN)


def native_row(row: SampleRow, changed: np.ndarray, num_changes: int) -> NativeRow:
    """Return the row for the kernels, with the first `num_changes` tokens of `changed`.

    It points to `changed` and to the row's mask, which must live as long.
    """
    params = row.params
    return NativeRow(
        params.temperature, *probability_limits(params), *penalties(params), params.top_k, params.seed & (1 << 64) - 1,
        row.choice, row.position, changed.ctypes.data if num_changes else None, num_changes,
        None if row.mask is None else row.mask.data_ptr(),
    )  # fmt: skip


class NativeSampler(Sampler):
    """Draws tokens by native code. A row takes the same path whatever else is in its batch."""

    def __init__(self, library: native.NativeLibrary):
        arguments = (_POINTER, _POINTER, _INT, _INT, _POINTER, _INT)
        self._draw = library.function("baton_draw", *arguments)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Draw one token for each row of logits fp32 [R, vocab_size], which are not changed."""
        logits = logits.contiguous()
        changed = [changes_of(row) for row in rows]
        pairs = zip(rows, changed, strict=True)
        table = (NativeRow * len(rows))(*(native_row(row, own, len(own) // 3) for row, own in pairs))
        drawn = (_INT * len(rows))()
        self._draw(table, logits.data_ptr(), len(rows), logits.shape[1], drawn, torch.get_num_threads())
        token_ids = list(drawn)
        logprobs = token_logprobs(logits, rows, token_ids)
        return [Sampled(token_id, logprobs.get(index)) for index, token_id in enumerate(token_ids)]


def host_sampler() -> Sampler:
    """Return the sampler of a CPU: native if there is a library."""
    library = native.library()
    return Sampler() if library is None else NativeSampler(library)
