"""Filters take tokens out before one is drawn: top_k, top_p, min_p. The twin on a GPU is kernels/sampling.py."""

import math

import torch
from torch import Tensor

from baton.sampling_params import SamplingParams

HEAD = 256  # tokens that nearly always hold a nucleus, so that a vocabulary need not be sorted
WHOLE = float(1 << 40)
NEVER = float("-inf")


def candidates(scores: Tensor, params: SamplingParams) -> Tensor:
    """Token ids that top_k, top_p and min_p leave of scores [vocab_size] after temperature, as transformers' warpers
    do: ties with the k-th are kept, top_p keeps the token that crosses it, the best token always stays."""
    ids = None
    if 0 < params.top_k < scores.numel():
        worst = torch.topk(scores, params.top_k).values[-1]
        ids = (scores >= worst).nonzero().view(-1)
        scores = scores[ids]
    if params.top_p < 1.0:
        kept = nucleus(scores, params.top_p)
        ids, scores = kept if ids is None else ids[kept], scores[kept]
    if params.min_p > 0.0:
        kept = (scores - scores.max()).exp() >= params.min_p
        ids = kept.nonzero().view(-1) if ids is None else ids[kept]
    return torch.arange(scores.numel(), device=scores.device) if ids is None else ids


def probability_limits(params: SamplingParams) -> tuple[float, float]:
    """Return how much of all probability is left, and how much of the best token's a token needs."""
    return params.top_p, params.min_p


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Return the indices, int64 [k], of the best of scores [vocab_size] whose probabilities first reach `top_p`, as
    transformers cuts: from the worst up.

    Among equal scores at the cut the higher ids stay (transformers leaves that to an unstable sort). Probabilities are
    whole numbers of 2^-40 of the best one's, so that no order of adding decides.
    """
    # fp32, as kernels/sampling.py has it.
    target = max(
        1,
        math.ceil(
            torch.tensor(top_p, dtype=torch.float32, device="cpu").item() * int(weights(scores, scores.max()).sum())
        ),
    )
    if scores.numel() > HEAD:
        best = scores.topk(HEAD)
        masses = weights(best.values, best.values[0])
        count = int((masses.cumsum(dim=0) - masses < target).sum())
        if count < HEAD and best.values[count - 1] > best.values[count]:  # not between equals
            return best.indices[:count]
    ordered, order = scores.sort(stable=True)
    masses = weights(ordered, ordered[-1]).flip(0)
    return order.flip(0)[masses.cumsum(dim=0) - masses < target]


def weights(scores: Tensor, highest: Tensor) -> Tensor:
    """Return exp(scores - highest) in units of 2^-40, int64."""
    return ((scores - highest).exp() * WHOLE).to(torch.int64)
