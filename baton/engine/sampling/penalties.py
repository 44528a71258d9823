"""Change logits before the temperature.

The order is: repetition penalty (prompt and output), presence and frequency penalties (output only), logit bias, and
the ban on stop tokens before min_tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.sampling_params import SamplingParams

TokenIds = Sequence[int] | np.ndarray


def changes(params: SamplingParams, banned: frozenset[int]) -> bool:
    """Return whether these parameters change any logit before the temperature."""
    return bool(params.has_penalties or params.logit_bias or banned)


def penalties(params: SamplingParams) -> tuple[float, float, float]:
    """Return the repetition, presence and frequency penalties, in this order."""
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


def penalize(
    logits: Tensor,
    params: SamplingParams,
    prompt_ids: TokenIds,
    output_ids: Sequence[int],
    banned: frozenset[int],
) -> None:
    """Change one row of logits, fp32 [vocab_size], in place. Tokens in `banned` become impossible."""
    if params.repetition_penalty != 1.0:
        met = np.union1d(np.asarray(prompt_ids, np.int64), np.asarray(output_ids, np.int64))
        seen = torch.from_numpy(met).to(logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if output_ids and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.tensor(output_ids, dtype=torch.int64, device=logits.device).unique(return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits[torch.tensor(ids, device=logits.device)] += torch.tensor(
            biases, dtype=logits.dtype, device=logits.device
        )
    if banned:
        logits[torch.tensor(sorted(banned), device=logits.device)] = float("-inf")


def changed_tokens(
    params: SamplingParams,
    prompt_ids: TokenIds,
    output_ids: Sequence[int],
    banned: frozenset[int],
    seen: int,
) -> np.ndarray:
    """Return the tokens that `penalize` changes, as kernels/sampling.py reads them: int32 [3 * tokens].

    Each token has its id; its number of occurrences in the output, with the bit `seen` if the repetition penalty
    applies; and the bits of the fp32 to add (-inf for a banned token).
    """
    output = np.asarray(output_ids, np.int32)
    repeated = output[:0]
    if params.repetition_penalty != 1.0:
        repeated = np.concatenate([np.asarray(prompt_ids, np.int32), output])
    biased = np.asarray([id_ for id_, _ in params.logit_bias], np.int32)
    barred = np.asarray(sorted(banned), np.int32)
    ids = np.unique(np.concatenate([output, repeated, biased, barred]))
    table = np.zeros((len(ids), 3), np.int32)
    table[:, 0] = ids
    np.add.at(table[:, 1], np.searchsorted(ids, output), 1)
    table[np.searchsorted(ids, repeated), 1] |= seen
    added = table.view(np.float32)[:, 2]
    added[np.searchsorted(ids, biased)] = [value for _, value in params.logit_bias]
    added[np.searchsorted(ids, barred)] = -np.inf
    return table.reshape(-1)
