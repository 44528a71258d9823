"""Make the masks of one step: the tokens that a constraint allows after a sequence's last token and each proposal."""

from collections.abc import Set
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.constraints.grammar import WORD_BITS, GrammarCursor, Vocabulary


class StepMasks(NamedTuple):
    """The masks of one sequence. From row `num_good` on they are invalid: no token may follow there, because of
    `problem`."""

    rows: Tensor  # int32 [1 + proposals, num_words], on the host
    num_good: int
    problem: str = ""


def step_masks(
    vocabulary: Vocabulary, cursor: GrammarCursor, draft_ids: list[int], stop_token_ids: Set[int], num_until_stop: int
) -> StepMasks:
    """Return the masks after `cursor` and after each proposal.

    Stop tokens are allowed only where the answer may end. Within the next `num_until_stop` tokens (before min_tokens)
    they are allowed only if no other token is.
    """
    masks = vocabulary.new_masks(1 + len(draft_ids))
    num_good, problem = 0, ""
    for mask, place in zip(masks, [cursor, *cursor.behind(draft_ids)], strict=True):
        if problem := fill_mask(mask, place, stop_token_ids, num_good < num_until_stop):
            break
        num_good += 1
    return StepMasks(torch.from_numpy(masks), num_good, problem)


def fill_mask(mask: np.ndarray, cursor: GrammarCursor, stop_token_ids: Set[int], is_early: bool) -> str:
    """Set `mask`, int32 [num_words], to the tokens allowed at `cursor`, with stop tokens as in `step_masks`.

    Returns why no token is allowed, or "".
    """
    if not cursor.fill(mask):
        return cursor.problem
    _set_stops(mask.view(np.uint32), stop_token_ids, cursor.may_end, is_early)
    return "" if mask.any() else "it leaves no token"


def _set_stops(words: np.ndarray, stop_token_ids: Set[int], may_end: bool, is_early: bool) -> None:
    places = [(token_id // WORD_BITS, 1 << token_id % WORD_BITS) for token_id in stop_token_ids]
    for word, bit in places:
        words[word] &= np.uint32(~bit & 0xFFFFFFFF)
    if may_end and not (is_early and words.any()):
        for word, bit in places:
            words[word] |= np.uint32(bit)
