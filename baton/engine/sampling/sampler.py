"""Logits to tokens. Order: penalties and bias, the mask of a constraint, then greedy, or temperature, filters and
Gumbel noise.

A row's token is a function of its logits and of (seed, choice, position); it does not depend on the rows beside it.
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

# Noise over a whole vocabulary is taken in fp32 first; what comes this near to the best is compared again in fp64, so
# that the outcome does not depend on the last bit of a vectorised logarithm.
NEAR = 1e-3
ROWS_AT_ONCE = 8  # of a whole vocabulary, so that the noise stays in cache
PROMPT_ROWS = 64  # of a prompt, whose logits are there at a time


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Parameters that one row of logits is drawn with. `position`: index in the whole sequence of the token being
    drawn."""

    params: SamplingParams
    choice: int
    position: int
    prompt_ids: TokenIds = ()  # what a repetition penalty meets, each once or as often as it is there
    output_ids: Sequence[int] = ()
    min_tokens_left_bans: frozenset[int] = frozenset()  # ids that may not be drawn while min_tokens is not reached
    mask: Tensor | None = None  # int32 [words] on the host, a bit for each id: only ids whose bit is set are drawn


NO_TOKENS: frozenset[int] = frozenset()


def sample_row(
    request: Request, params: SamplingParams, choice: int, token_ids: list[int], draft_ids: Sequence[int] = (),
    mask: Tensor | None = None,
) -> SampleRow:  # fmt: skip
    """Return the parameters of the token after token_ids + draft_ids. `params`: request.sampling, or it without
    logprobs; `mask`: of a constraint, which knows of min_tokens."""
    num_tokens, border = len(token_ids) + len(draft_ids), request.num_prompt_tokens
    is_early = mask is None and num_tokens - border < request.min_tokens
    banned = request.stop_token_ids if is_early else NO_TOKENS
    if not params.has_penalties:
        return SampleRow(params, choice, num_tokens, (), (), banned, mask)
    seen = prompt_seen(request) if params.repetition_penalty != 1.0 else ()
    return SampleRow(params, choice, num_tokens, seen, [*token_ids[border:], *draft_ids], banned, mask)


def prompt_seen(request: Request) -> np.ndarray:
    """Return the different tokens of a prompt, found once: in each step 32,768 tokens took 3.5 ms, in which all
    sequences wait."""
    if not request.prompt_seen:
        request.prompt_seen.append(np.unique(np.asarray(request.token_ids[: request.num_prompt_tokens], np.int32)))
    return request.prompt_seen[0]


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
        """Return the same tokens where the logits are, int64 [R]. No row asks for log-probabilities."""
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
    """One token of scores [vocab_size] (before temperature); noise is made for what survives the filters only."""
    scores = scores / row.params.temperature
    ids = candidates(scores, row.params)
    if ids.numel() == 1:
        return int(ids)
    key = noise_key(row.params.seed, row.choice, row.position)
    return int(ids[(scores[ids].double() + gumbel(uniform(key, ids))).argmax()])


def draw_plain(scores: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """One token per row of scores [R, vocab_size] (before temperature), no filters: any token may win."""
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
        token_ids.append(int(ids))
    return token_ids


def token_logprobs(logits: Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
    """Return by row index, for the rows that asked, the log-softmax of the raw logits [R, vocab_size]: chosen and
    best."""
    asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return {}
    result = {}
    # One call per width: which of several equal values topk names first depends on how many are wanted.
    for count in {rows[index].params.logprobs for index in asked}:
        lines = [index for index in asked if rows[index].params.logprobs == count]
        result |= zip(lines, best_logprobs(logits[lines], [token_ids[index] for index in lines], count), strict=True)
    return result


def prompt_logprobs(
    hidden: Tensor, token_ids: Sequence[int], count: int, to_logits: Callable[[Tensor], Tensor]
) -> list[TokenLogprobs]:
    """Return the log-probabilities of a prompt's tokens, each behind its row of hidden [R, hidden_size]: the token's
    and the `count` best. Logits are made of a few rows at a time: those of a chunk of 8,192 would be 4.6 GB with a
    vocabulary of 151,936."""
    found = []
    for begin in range(0, len(token_ids), PROMPT_ROWS):
        part = token_ids[begin : begin + PROMPT_ROWS]
        found += best_logprobs(to_logits(hidden[begin : begin + len(part)]), part, count)
    return found


def label_logprobs(logits: Tensor, token_ids: Sequence[int]) -> list[float]:
    """Return the log-softmax of logits [1, vocab_size] at these tokens."""
    return logits.log_softmax(dim=1)[0, torch.tensor(token_ids, device=logits.device)].tolist()


def best_logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return the log-softmax of logits [R, vocab_size]: of a token for each row, and of the `count` best."""
    table = logits.log_softmax(dim=1)
    chosen = table.gather(1, torch.tensor(token_ids, device=table.device).unsqueeze(1)).squeeze(1).tolist()
    values, ids = (part.tolist() for part in table.topk(min(count, table.shape[1]), dim=1))
    return [
        TokenLogprobs(token, tuple(zip(*best, strict=True)))
        for token, *best in zip(zip(token_ids, chosen, strict=True), ids, values, strict=True)
    ]
