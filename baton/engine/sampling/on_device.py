"""Tokens drawn where the logits are: one copy of token ids a step, and nothing waits for the device before it.

The same draw as sampler.py's, whose words hold here: noise over the whole vocabulary in fp32, the best few compared
again in fp64. Rows whose draw depends on the tokens before (penalties), or that give log-probabilities too, take the
other path, which asks the device more often.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.core.request import Request
from baton.engine.sampling.filters import NEVER, sent, survivors
from baton.engine.sampling.masking import apply_masks
from baton.engine.sampling.noise import gumbel, noise_key, uniform
from baton.engine.sampling.sampler import NO_TOKENS, Sampled, Sampler, SampleRow

BEST = 16  # tokens of a row that are compared in fp64: within 1e-3 of the best there are hardly ever two


class DeviceSampler(Sampler):
    """See the module. A row takes the same path whatever shares its batch."""

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Draw one token per row of logits fp32 [R, vocab_size], which stay as they are."""
        plain = [index for index, row in enumerate(rows) if is_plain(row)]
        if len(plain) == len(rows):
            return [Sampled(token_id, None) for token_id in draw(logits, rows).tolist()]
        others = [index for index in range(len(rows)) if index not in set(plain)]
        found = dict(zip(others, super().sample(logits[others], [rows[index] for index in others]), strict=True))
        if plain:
            drawn = draw(logits[plain], [rows[index] for index in plain]).tolist()
            found |= {index: Sampled(token_id, None) for index, token_id in zip(plain, drawn, strict=True)}
        return [found[index] for index in range(len(rows))]


def draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """int64 [R], on the device of logits fp32 [R, vocab_size], which stay as they are. All rows are plain."""
    logits = _biased(logits, rows)
    best = logits.argmax(dim=1)
    drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if not drawn:
        return best
    device, chosen = logits.device, [rows[index] for index in drawn]
    keys = [noise_key(row.params.seed, row.choice, row.position) for row in chosen]
    index, keys = sent([drawn, keys], torch.int64, device)
    temperatures = sent([row.params.temperature for row in chosen], torch.float32, device)
    scores = logits if len(drawn) == len(rows) else logits[index]
    scores = scores / temperatures.unsqueeze(1)
    if filtered := [place for place, row in enumerate(chosen) if row.params.has_filters]:
        places = sent(filtered, torch.int64, device)
        scores[places] = survivors(scores[places], [chosen[place].params for place in filtered])
    keys = keys.unsqueeze(1)
    token_ids = torch.arange(scores.shape[1], device=device)
    rough = scores + gumbel(uniform(keys, token_ids).float())
    ids = rough.topk(min(BEST, scores.shape[1]), dim=1).indices.sort(dim=1).values  # of equals the lowest id wins
    exact = scores.gather(1, ids).double() + gumbel(uniform(keys, ids))
    return best.index_copy(0, index, ids.gather(1, exact.argmax(dim=1, keepdim=True)).squeeze(1))


def _biased(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """With what rows add to logits, and without what they may not draw yet."""
    biases = [(index, *bias) for index, row in enumerate(rows) for bias in row.params.logit_bias]
    banned = [(index, id_) for index, row in enumerate(rows) for id_ in sorted(row.min_tokens_left_bans)]
    masked = {index: row.mask for index, row in enumerate(rows) if row.mask is not None}
    if biases or banned or masked:
        logits = logits.clone()
    if biases:
        where, ids, values = zip(*biases, strict=True)
        added = sent(values, logits.dtype, logits.device)
        logits.index_put_(tuple(sent([where, ids], torch.int64, logits.device)), added, accumulate=True)
    if banned:
        logits[tuple(sent(list(zip(*banned, strict=True)), torch.int64, logits.device))] = NEVER
    if masked:
        apply_masks(logits, list(masked), list(masked.values()))
    return logits


def plain_row(request: Request, choice: int, num_tokens: int) -> SampleRow | None:
    """Return what the token after `num_tokens` tokens is drawn with, whatever these are; None where it depends on
    them."""
    if request.constraint is not None:
        return None
    banned = request.stop_token_ids if num_tokens - request.num_prompt_tokens < request.min_tokens else NO_TOKENS
    row = SampleRow(request.sampling, choice, num_tokens, (), (), banned)
    return row if is_plain(row) else None


def is_plain(row: SampleRow) -> bool:
    """Return whether `draw` draws it."""
    return row.params.logprobs is None and not row.params.has_penalties
