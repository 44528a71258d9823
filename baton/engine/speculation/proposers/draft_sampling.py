"""Draw a draft's tokens with the noise and history with which the target would draw from the same logits."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from baton.engine.core.request import Request
from baton.engine.sampling.sampler import Sampler, sample_row
from baton.engine.speculation.proposers.proposer import Draftee
from baton.sampling_params import SamplingParams


def draw(sampler: Sampler, logits: Tensor, draftees: Sequence[Draftee], drafts: Sequence[Sequence[int]]) -> list[int]:
    """Draw one token per row of a draft's logits fp32 [R, vocab_size]: row i follows draftees[i].token_ids and its
    proposals so far, drafts[i]."""
    if all(is_argmax(draftee.request) for draftee in draftees):
        return logits.argmax(dim=1).tolist()
    rows = [
        sample_row(draftee.request, _silent(draftee.request.sampling), draftee.choice, draftee.token_ids, draft)
        for draftee, draft in zip(draftees, drafts, strict=True)
    ]
    return [sampled.token_id for sampled in sampler.sample(logits, rows)]


@lru_cache(maxsize=1024)
def _silent(params: SamplingParams) -> SamplingParams:
    """Return the parameters without logprobs, which nobody reads of a draft."""
    return replace(params, logprobs=None)


def is_argmax(request: Request) -> bool:
    """Return whether the request's next token is simply the most likely one."""
    params = request.sampling
    return params.is_greedy and not (params.has_penalties or params.logit_bias or request.min_tokens)
