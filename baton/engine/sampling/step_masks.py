"""The tokens that a constraint leaves a sequence in one step: a bit for each, for its last token and for each
proposal."""

from collections.abc import Set
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.constraints.grammar import WORD_BITS, GrammarCursor, Vocabulary


class StepMasks(NamedTuple):
    """Where `num_good` is less than the rows, nothing may follow there, for the reason `problem`: that row and those
    behind it mean nothing."""

    rows: Tensor  # int32 [1 + proposals, num_words], on the host
    num_good: int
    problem: str = ""


def step_masks(
    vocabulary: Vocabulary, cursor: GrammarCursor, draft_ids: list[int], stop_token_ids: Set[int], num_until_stop: int
) -> StepMasks:
    """Return the masks behind `cursor` and behind each proposal. Stop tokens are drawn where the answer may end, and
    only there: in the next `num_until_stop` tokens (of min_tokens) only where nothing else may follow."""
    masks = vocabulary.new_masks(1 + len(draft_ids))
    num_good, problem = 0, ""
    for mask, place in zip(masks, [cursor, *cursor.behind(draft_ids)], strict=True):
        if problem := fill_mask(mask, place, stop_token_ids, num_good < num_until_stop):
            break
        num_good += 1
    return StepMasks(torch.from_numpy(masks), num_good, problem)


def fill_mask(mask: np.ndarray, cursor: GrammarCursor, stop_token_ids: Set[int], is_early: bool) -> str:
    """Set `mask`, int32 [num_words], to what may follow at `cursor`; stop tokens as in `step_masks`. Return why nothing
    may, or ""."""
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
