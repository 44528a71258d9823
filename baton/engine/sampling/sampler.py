"""Draw tokens from logits: penalties and bias, the mask of a constraint, then greedy, or temperature, filters and
noise.

A row's token is a function of its logits and of (seed, choice, position), whatever other rows are in the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engine.core.request import Request, TokenLogprobs
from baton.engine.sampling.filters import candidates
from baton.engine.sampling.masking import apply_masks
from baton.engine.sampling.noise import gumbel, noise_key, uniform
from baton.engine.sampling.penalties import TokenIds, changes, penalize
from baton.sampling_params import SamplingParams

# Noise for a whole vocabulary is computed in fp32 first. Tokens this near to the best are compared again in fp64, so
# that the result does not depend on the last bit of a vectorised logarithm.
NEAR = 1e-3
ROWS_AT_ONCE = 8  # rows whose noise is computed together, so that it stays in cache
PROMPT_ROWS = 64  # rows of a prompt whose logits are in memory at a time


@dataclass(frozen=True, slots=True)
class SampleRow:
    """The parameters for drawing one token. `position`: the token's index in the whole sequence."""

    params: SamplingParams
    choice: int
    position: int
    prompt_ids: TokenIds = ()  # for the repetition penalty; duplicates do not matter
    output_ids: Sequence[int] = ()
    min_tokens_left_bans: frozenset[int] = frozenset()  # ids that may not be drawn before min_tokens
    mask: Tensor | None = None  # int32 [words] on the host: only ids whose bit is set may be drawn


NO_TOKENS: frozenset[int] = frozenset()


def sample_row(
    request: Request, params: SamplingParams, choice: int, token_ids: list[int], draft_ids: Sequence[int] = (),
    mask: Tensor | None = None,
) -> SampleRow:  # fmt: skip
    """Return the parameters for drawing the token after token_ids + draft_ids.

    `params`: request.sampling, or a copy without logprobs. `mask`: of a constraint, and already respects min_tokens.
    """
    num_tokens, border = len(token_ids) + len(draft_ids), request.num_prompt_tokens
    is_early = mask is None and num_tokens - border < request.min_tokens
    banned = request.stop_token_ids if is_early else NO_TOKENS
    if not params.has_penalties:
        return SampleRow(params, choice, num_tokens, (), (), banned, mask)
    seen = prompt_seen(request) if params.repetition_penalty != 1.0 else ()
    return SampleRow(params, choice, num_tokens, seen, [*token_ids[border:], *draft_ids], banned, mask)


def prompt_seen(request: Request) -> np.ndarray:
    """Return the distinct tokens of a prompt, computed once: for 32,768 tokens every step would take 3.5 ms longer."""
    if not request.prompt_seen:
        request.prompt_seen.append(np.unique(np.asarray(request.token_ids[: request.num_prompt_tokens], np.int32)))
    return request.prompt_seen[0]


class Sampled(NamedTuple):
    """A drawn token."""

    token_id: int
    logprobs: TokenLogprobs | None


class Sampler:
    """Draws one token for each row of logits, on the host."""

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Draw one token for each row of logits fp32 [R, vocab_size], which are not changed."""
        scores = self._penalized(logits, rows)
        token_ids = scores.argmax(dim=1).tolist()
        plain = []
        for index, row in enumerate(rows):
            if row.params.is_greedy:
                continue
            if row.params.has_filters:
                token_ids[index] = draw_filtered(scores[index], row)
            else:
                plain.append(index)
        for begin in range(0, len(plain), ROWS_AT_ONCE):
            part = plain[begin : begin + ROWS_AT_ONCE]
            for index, token_id in zip(part, draw_plain(scores[part], [rows[i] for i in part]), strict=True):
                token_ids[index] = token_id
        logprobs = token_logprobs(logits, rows, token_ids)
        return [Sampled(token_id, logprobs.get(index)) for index, token_id in enumerate(token_ids)]

    def draw(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Draw the same tokens as `sample`, as int64 [R] on the logits' device. No row may ask for
        log-probabilities."""
        token_ids = [each.token_id for each in self.sample(logits, rows)]
        return torch.tensor(token_ids, dtype=torch.int64, device=logits.device)

    def _penalized(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        changed = [index for index, row in enumerate(rows) if changes(row.params, row.min_tokens_left_bans)]
        masked = [index for index, row in enumerate(rows) if row.mask is not None]
        if not changed and not masked:
            return logits
        scores = logits.clone()
        for index in changed:
            row = rows[index]
            penalize(scores[index], row.params, row.prompt_ids, row.output_ids, row.min_tokens_left_bans)
        if masked:
            apply_masks(scores, masked, [rows[index].mask for index in masked])
        return scores


def draw_filtered(scores: Tensor, row: SampleRow) -> int:
    """Draw one token from scores [vocab_size] (before temperature), with noise only for the tokens left by the
    filters."""
    scores = scores / row.params.temperature
    ids = candidates(scores, row.params)
    if ids.numel() == 1:
        return int(ids)
    key = noise_key(row.params.seed, row.choice, row.position)
    return int(ids[(scores[ids].double() + gumbel(uniform(key, ids))).argmax()])


def draw_plain(scores: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Draw one token for each row of scores [R, vocab_size] (before temperature), without filters."""
    device = scores.device
    temperatures = torch.tensor([row.params.temperature for row in rows], device=device).unsqueeze(1)
    keys = [noise_key(row.params.seed, row.choice, row.position) for row in rows]
    scores = scores / temperatures
    uniforms = uniform(torch.tensor(keys, device=device).unsqueeze(1), torch.arange(scores.shape[1], device=device))
    rough = scores + gumbel(uniforms.float())
    near = rough >= rough.amax(dim=1, keepdim=True) - NEAR
    token_ids = []
    for index, winners in enumerate(near):
        ids = winners.nonzero().view(-1)
        if ids.numel() > 1:
            ids = ids[(scores[index, ids].double() + gumbel(uniforms[index, ids])).argmax()]
        token_ids.append(int(ids) if ids.numel() else 0)  # a NaN is near to none
    return token_ids


def token_logprobs(logits: Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of the chosen and the best tokens, by row index, for rows that ask for them.

    They are the log-softmax of the raw logits [R, vocab_size].
    """
    asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return {}
    result = {}
    # One call for each count: the order of equal values in topk depends on it.
    for count in {rows[index].params.logprobs for index in asked}:
        lines = [index for index in asked if rows[index].params.logprobs == count]
        result |= zip(lines, best_logprobs(logits[lines], [token_ids[index] for index in lines], count), strict=True)
    return result


def prompt_logprobs(
    hidden: Tensor, token_ids: Sequence[int], count: int, to_logits: Callable[[Tensor], Tensor]
) -> list[TokenLogprobs]:
    """Return the log-probabilities of a prompt's tokens and of the `count` best in their places.

    Each token follows its row of hidden [R, hidden_size]. Logits are computed for a few rows at a time: for a chunk of
    8,192 and a vocabulary of 151,936 they would take 4.6 GB.
    """
    found = []
    for begin in range(0, len(token_ids), PROMPT_ROWS):
        part = token_ids[begin : begin + PROMPT_ROWS]
        found += best_logprobs(to_logits(hidden[begin : begin + len(part)]), part, count)
    return found


def label_logprobs(logits: Tensor, token_ids: Sequence[int]) -> list[float]:
    """Return the log-softmax of logits [1, vocab_size] at these tokens."""
    return logits.log_softmax(dim=1)[0, torch.tensor(token_ids, device=logits.device)].tolist()


def best_logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return the log-softmax of logits [R, vocab_size] for a given token of each row and for the `count` best."""
    table = logits.log_softmax(dim=1)
    chosen = table.gather(1, torch.tensor(token_ids, device=table.device).unsqueeze(1)).squeeze(1).tolist()
    values, ids = (part.tolist() for part in table.topk(min(count, table.shape[1]), dim=1))
    return [
        TokenLogprobs(token, tuple(zip(*best, strict=True)))
        for token, *best in zip(zip(token_ids, chosen, strict=True), ids, values, strict=True)
    ]
