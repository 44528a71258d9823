"""Tokens drawn where the logits are: one copy of token ids a step, and nothing waits for the device before it.

The same draw as sampler.py's, whose words hold here: noise over the whole vocabulary in fp32, the best few compared
again in fp64. Rows with penalties, filters or log-probabilities take the other path, which asks the device more often.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.sampling.noise import gumbel, noise_key, uniform
from baton.engine.sampling.penalties import changes
from baton.engine.sampling.sampler import Sampled, Sampler, SampleRow, has_filters

BEST = 16  # tokens of a row that are compared in fp64: within 1e-3 of the best there are hardly ever two


class DeviceSampler(Sampler):
    """See the module."""

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        if not all(map(_is_plain, rows)):
            return super().sample(logits, rows)
        return [Sampled(token_id, None) for token_id in draw(logits, rows).tolist()]


def draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """int64 [R], on the device of logits fp32 [R, vocab_size]. No row has penalties or filters."""
    best = logits.argmax(dim=1)
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if not drawn:
        return best
    chosen = [rows[index] for index in drawn]
    keys = [noise_key(row.params.seed, row.choice, row.position) for row in chosen]
    words = torch.tensor([drawn, keys], dtype=torch.int64, device="cpu")
    temperatures = torch.tensor([row.params.temperature for row in chosen], dtype=torch.float32, device="cpu")
    if logits.device.type == "cuda":
        words, temperatures = words.pin_memory(), temperatures.pin_memory()
    index, keys = words.to(logits.device, non_blocking=True)
    scores = logits if len(drawn) == len(rows) else logits[index]
    scores = scores / temperatures.to(logits.device, non_blocking=True).unsqueeze(1)
    keys = keys.unsqueeze(1)
    token_ids = torch.arange(scores.shape[1], device=logits.device)
    rough = scores + gumbel(uniform(keys, token_ids).float())
    ids = rough.topk(min(BEST, scores.shape[1]), dim=1).indices.sort(dim=1).values  # of equals the lowest id wins
    exact = scores.gather(1, ids).double() + gumbel(uniform(keys, ids))
    return best.index_copy(0, index, ids.gather(1, exact.argmax(dim=1, keepdim=True)).squeeze(1))


def _is_plain(row: SampleRow) -> bool:
    params = row.params
    return params.logprobs is None and not has_filters(params) and not changes(params, row.min_tokens_left_bans)
