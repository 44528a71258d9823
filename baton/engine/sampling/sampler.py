"""Logits to tokens. Order: penalties and bias, then greedy, or temperature, top_k, top_p, min_p and Gumbel noise.

A row's token is a function of its logits and of (seed, choice, position); it does not depend on the rows beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.core.request import Request, SamplingParams, TokenLogprobs
from baton.engine.sampling.noise import gumbel, noise_key, uniform
from baton.engine.sampling.penalties import changes, penalize

# Noise over a whole vocabulary is taken in fp32 first; what comes this near to the best is compared again in fp64, so
# that the outcome does not hang on the last bit of a vectorised logarithm.
NEAR = 1e-3
HEAD, HAIR = 256, 1e-5  # tokens that nearly always hold a nucleus, so that a vocabulary need not be sorted
ROWS_AT_ONCE = 8  # of a whole vocabulary, so that the noise stays in cache


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits is drawn with. `position`: index in the whole sequence of the token being drawn."""

    params: SamplingParams
    choice: int
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    min_tokens_left_bans: frozenset[int] = frozenset()  # ids that may not be drawn while min_tokens is not reached


NO_TOKENS: frozenset[int] = frozenset()


def sample_row(
    request: Request, params: SamplingParams, choice: int, token_ids: list[int], draft_ids: Sequence[int] = ()
) -> SampleRow:
    """What the token after token_ids + draft_ids is drawn with. `params`: request.sampling, or it without logprobs."""
    num_tokens, border = len(token_ids) + len(draft_ids), request.num_prompt_tokens
    banned = request.stop_token_ids if num_tokens - border < request.min_tokens else NO_TOKENS
    if params.repetition_penalty == 1 and not params.presence_penalty and not params.frequency_penalty:
        return SampleRow(params, choice, num_tokens, (), (), banned)
    return SampleRow(params, choice, num_tokens, token_ids[:border], [*token_ids[border:], *draft_ids], banned)


class Sampled(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None


class Sampler:
    """Draws one token per row."""

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """logits fp32 [R, vocab_size], one SampleRow each. `logits` is left as it is."""
        scores = self._penalized(logits, rows)
        token_ids = scores.argmax(dim=1).tolist()
        plain = []
        for index, row in enumerate(rows):
            if row.params.temperature == 0.0:
                continue
            if has_filters(row.params):
                token_ids[index] = draw_filtered(scores[index], row)
            else:
                plain.append(index)
        for begin in range(0, len(plain), ROWS_AT_ONCE):
            part = plain[begin : begin + ROWS_AT_ONCE]
            for index, token_id in zip(part, draw_plain(scores[part], [rows[i] for i in part]), strict=True):
                token_ids[index] = token_id
        logprobs = token_logprobs(logits, rows, token_ids)
        return [Sampled(token_id, logprobs.get(index)) for index, token_id in enumerate(token_ids)]

    def _penalized(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        changed = [index for index, row in enumerate(rows) if changes(row.params, row.min_tokens_left_bans)]
        if not changed:
            return logits
        scores = logits.clone()
        for index in changed:
            row = rows[index]
            penalize(scores[index], row.params, row.prompt_ids, row.output_ids, row.min_tokens_left_bans)
        return scores


def has_filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


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
    return torch.arange(scores.numel()) if ids is None else ids


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Indices of the best scores whose probabilities first reach `top_p`, as transformers cuts: from the worst up.

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


def draw_filtered(scores: Tensor, row: SampleRow) -> int:
    """One token of scores [vocab_size] (before temperature); noise is made for what survives the filters only."""
    scores = scores / row.params.temperature
    ids = candidates(scores, row.params)
    if ids.numel() == 1:
        return int(ids)
    key = noise_key(row.params.seed, row.choice, row.position)
    return int(ids[(scores[ids].double() + gumbel(uniform(key, ids))).argmax()])


def draw_plain(scores: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """One token per row of scores [R, vocab_size] (before temperature), no filters: any token may win."""
    temperatures = torch.tensor([row.params.temperature for row in rows]).unsqueeze(1)
    keys = torch.tensor([noise_key(row.params.seed, row.choice, row.position) for row in rows]).unsqueeze(1)
    scores = scores / temperatures
    uniforms = uniform(keys, torch.arange(scores.shape[1]))
    rough = scores + gumbel(uniforms.float())
    near = rough >= rough.amax(dim=1, keepdim=True) - NEAR
    token_ids = []
    for index, winners in enumerate(near):
        ids = winners.nonzero().view(-1)
        if ids.numel() > 1:
            ids = ids[(scores[index, ids].double() + gumbel(uniforms[index, ids])).argmax()]
        token_ids.append(int(ids))
    return token_ids


def token_logprobs(logits: Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
    """By row index, for the rows that asked: log-softmax of the raw logits, chosen and best."""
    asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return {}
    table = logits[asked].log_softmax(dim=1)
    result = {}
    # One call per width: which of several equal values topk names first depends on how many are wanted.
    for count in {rows[index].params.logprobs for index in asked}:
        lines = [line for line, index in enumerate(asked) if rows[index].params.logprobs == count]
        values, ids = (part.tolist() for part in table[lines].topk(min(count, table.shape[1]), dim=1))
        for line, row_ids, row_values in zip(lines, ids, values, strict=True):
            token_id = token_ids[asked[line]]
            best = tuple(zip(row_ids, row_values, strict=True))
            result[asked[line]] = TokenLogprobs((token_id, float(table[line, token_id])), best)
    return result
