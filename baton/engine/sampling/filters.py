"""Filter the tokens that may be drawn: top_k, top_p, min_p. kernels/sampling.py does the same on a GPU."""

import math

import torch
from torch import Tensor

from baton.sampling_params import SamplingParams

HEAD = 256  # the best tokens, which nearly always contain the nucleus, so that a vocabulary need not be sorted
WHOLE = float(1 << 40)
NEVER = float("-inf")


def candidates(scores: Tensor, params: SamplingParams) -> Tensor:
    """Return the token ids that top_k, top_p and min_p leave of scores [vocab_size] after temperature.

    As in transformers, ties with the k-th token are kept, top_p keeps the token that crosses it, and the best token
    always stays.
    """
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
    """Return the probability mass that top_p keeps, and min_p: the least probability relative to the best token."""
    return params.top_p, params.min_p


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Return the indices, int64 [k], of the best of scores [vocab_size] whose probabilities together reach `top_p`.

    As in transformers, tokens are cut from the worst up. Of equal scores at the cut the higher ids stay (transformers
    leaves that to an unstable sort). Probabilities are integers in units of 2^-40 of the best one's, so that the order
    of adding does not matter.
    """
    # fp32, as in kernels/sampling.py
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
        if count < HEAD and best.values[count - 1] > best.values[count]:  # the cut is not between equal scores
            return best.indices[:count]
    ordered, order = scores.sort(stable=True)
    masses = weights(ordered, ordered[-1]).flip(0)
    return order.flip(0)[masses.cumsum(dim=0) - masses < target]


def weights(scores: Tensor, highest: Tensor) -> Tensor:
    """Return exp(scores - highest) in units of 2^-40, int64."""
    return ((scores - highest).exp() * WHOLE).to(torch.int64)
