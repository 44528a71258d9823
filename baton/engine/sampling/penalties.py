"""Change logits before a temperature does, in this order: repetition penalty (prompt and output), presence and
frequency penalties (output only), logit bias, and the ban on ending before min_tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.sampling_params import SamplingParams


def changes(params: SamplingParams, banned: frozenset[int]) -> bool:
    """Return whether these parameters change any logit before the temperature."""
    return bool(params.has_penalties or params.logit_bias or banned)


def penalize(
    logits: Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    banned: frozenset[int],
) -> None:
    """Change one row of logits, fp32 [vocab_size], in place. Tokens in `banned` become impossible."""
    if params.repetition_penalty != 1.0:
        seen = torch.tensor((*prompt_ids, *output_ids), dtype=torch.int64, device=logits.device).unique()
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
