"""Draw tokens on the device of the logits by kernels/sampling.py.

That is one copy of parameters to the device and two launches, without waiting for the device before the token ids are
read.

It draws the same tokens as sampler.py. Rows with log-probabilities are drawn there, which waits for the device more
often.
"""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from baton.engine import kernels
from baton.engine.core.request import Request
from baton.engine.sampling.filters import probability_limits
from baton.engine.sampling.noise import noise_key
from baton.engine.sampling.penalties import changed_tokens, changes, penalties
from baton.engine.sampling.sampler import NO_TOKENS, Sampled, Sampler, SampleRow

MAX_INT32 = 2**31 - 1  # of a word


class DeviceSampler(Sampler):
    """Draws tokens on a GPU. A row takes the same path whatever else is in its batch."""

    def __init__(self):
        from baton.engine.kernels import sampling  # triton is an extra

        self._kernels = sampling

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Draw one token for each row of logits fp32 [R, vocab_size], which are not changed."""
        drawn = [index for index, row in enumerate(rows) if row.params.logprobs is None]
        if len(drawn) == len(rows):
            return [Sampled(token_id, None) for token_id in self.draw(logits, rows).tolist()]
        others = [index for index in range(len(rows)) if index not in set(drawn)]
        found = dict(zip(others, super().sample(logits[others], [rows[index] for index in others]), strict=True))
        if drawn:
            token_ids = self.draw(logits[drawn], [rows[index] for index in drawn]).tolist()
            found |= {index: Sampled(token_id, None) for index, token_id in zip(drawn, token_ids, strict=True)}
        return [found[index] for index in range(len(rows))]

    def draw(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Draw tokens as Sampler.draw does, without waiting for the device."""
        given, num_slots = packed(self._kernels, rows)
        if logits.device.type == "cuda":
            given = given.pin_memory()
        return self._kernels.draw(logits, given.to(logits.device, non_blocking=True), num_slots)


def sampler_on(device: torch.device) -> Sampler:
    """Return the sampler of a GPU; without Triton, the host's."""
    return Sampler() if kernels.unavailable(device.type) else DeviceSampler()


def packed(kernel: ModuleType, rows: Sequence[SampleRow]) -> tuple[Tensor, int]:
    """Return rows as the kernels read them, and how many rows need their scores kept.

    The tensor is int32 on the host: a record for each row, then the arrays that the records point to.
    """
    floats, ways, pointers, parts = [], [], [], []
    end, num_slots = len(rows) * kernel.RECORD.value, 0
    for row in rows:
        params = row.params
        filtered, changed = params.has_filters and not params.is_greedy, changes(params, row.min_tokens_left_bans)
        way = kernel.FILTERED if filtered else kernel.GREEDY if params.is_greedy else kernel.PLAIN
        floats.append((params.temperature or 1.0, *probability_limits(params), *penalties(params)))
        ways.append((way.value, min(params.top_k, MAX_INT32)))
        first, mask, slot = end, -1, 0
        if changed:
            parts.append(
                changed_tokens(params, row.prompt_ids, row.output_ids, row.min_tokens_left_bans, kernel.SEEN.value)
            )
            end += len(parts[-1])
        last = end
        if row.mask is not None:
            mask = end
            parts.append(row.mask.numpy())
            end += len(parts[-1])
        if filtered or changed:
            slot, num_slots = num_slots, num_slots + 1
        pointers.append((first, last, mask, slot))
    words = np.zeros((len(rows), kernel.RECORD.value), np.int32)
    words.view(np.float32)[:, : kernel.MODE.value] = floats
    words[:, kernel.MODE.value : kernel.KEY_LOW.value] = ways
    words.view(np.int64)[:, kernel.KEY_LOW.value // 2] = [
        noise_key(row.params.seed, row.choice, row.position) for row in rows
    ]
    words[:, kernel.FIRST_CHANGE.value : kernel.SLOT.value + 1] = pointers
    return torch.from_numpy(np.concatenate([words.reshape(-1), *parts])), num_slots


def plain_row(request: Request, choice: int, num_tokens: int) -> SampleRow | None:
    """Return the parameters for drawing the token after the first `num_tokens`, if they do not depend on these tokens.

    None if they do (penalties, a constraint), or if log-probabilities are asked for.
    """
    params = request.sampling
    if request.constraint is not None or params.has_penalties or params.logprobs is not None:
        return None
    banned = request.stop_token_ids if num_tokens - request.num_prompt_tokens < request.min_tokens else NO_TOKENS
    return SampleRow(params, choice, num_tokens, (), (), banned)
