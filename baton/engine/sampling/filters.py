"""Filters take tokens out before one is drawn: top_k, top_p, min_p, row by row on a host and for all rows on a device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.sampling_params import SamplingParams

HEAD, HAIR = 256, 1e-5  # tokens that nearly always hold a nucleus, so that a vocabulary need not be sorted
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
        probabilities = scores.softmax(dim=0)
        kept = probabilities >= params.min_p * probabilities.max()
        ids = kept.nonzero().view(-1) if ids is None else ids[kept]
    return torch.arange(scores.numel(), device=scores.device) if ids is None else ids


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Return the indices, int64 [k], of the best of scores [vocab_size] whose probabilities first reach `top_p`, as transformers cuts: from the worst up.

    Among equal scores at the cut the higher ids stay (transformers leaves that to an unstable sort).
    """
    if scores.numel() > HEAD:
        best = scores.softmax(dim=0).topk(HEAD)
        before = best.values.cumsum(dim=0) - best.values
        count = int((before < top_p).sum())
        # Whole, not by a hair, and not between equals: else the order of adding and sorting decides, and it is theirs.
        if count < HEAD and best.values[count - 1] > best.values[count] and (before - top_p).abs().min() > HAIR:
            return best.indices[:count]
    ordered, order = scores.sort(stable=True)
    kept = ordered.softmax(dim=0).cumsum(dim=0) > 1 - top_p
    kept[-1] = True
    return order[kept]


def survivors(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """scores [R, vocab_size] after temperature, -inf where top_k, top_p or min_p take a token out: `candidates` of all
    rows at once, from whole sorted rows, since how many would do is not known here."""
    vocab_size = scores.shape[1]
    first = [vocab_size - (each.top_k if 0 < each.top_k < vocab_size else vocab_size) for each in params]
    limits = sent([[1 - each.top_p, each.min_p] for each in params], torch.float32, scores.device)
    ordered, order = scores.sort(dim=1, stable=True)  # ascending
    worst = ordered.gather(1, sent(first, torch.int64, scores.device).unsqueeze(1))
    ordered = ordered.masked_fill(ordered < worst, NEVER)
    # A top_p of 1 takes nothing out, whatever the sum rounds to.
    outside = (ordered.softmax(dim=1).cumsum(dim=1) <= limits[:, :1]) & (limits[:, :1] > 0)
    outside[:, -1] = False
    ordered = ordered.masked_fill(outside, NEVER)
    shares = ordered.softmax(dim=1)
    ordered = ordered.masked_fill(shares < limits[:, 1:] * shares.amax(dim=1, keepdim=True), NEVER)
    return torch.empty_like(scores).scatter_(1, order, ordered)


def sent(values: Sequence, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `values`, a list [R] or a list of lists [R, C], as a tensor on the device, by a copy that is not waited for."""
    made = torch.tensor(values, dtype=dtype, device="cpu")
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
