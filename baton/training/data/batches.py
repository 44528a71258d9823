"""Batches: windows of the token stream, each a pure function of its number, so that a resumed run continues exactly."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from baton.training.data.corpus import Corpus, Document
from baton.training.data.tokenizer import END_OF_TEXT

# Windows start at multiples of the golden ratio, so any number of draws covers the text evenly. Independent draws would
# not: after four epochs 2 % of the text would be unseen.
_GOLDEN = 0.6180339887498949
_TESTS_EVERY = 5


def pack(tokenizer: Tokenizer, documents: Iterable[Document]) -> np.ndarray:
    """Return all documents as one array of token ids uint32 [tokens], each after an end-of-text token if the tokenizer
    has one."""
    separator = [] if (end := tokenizer.token_to_id(END_OF_TEXT)) is None else [end]
    encodings = tokenizer.encode_batch([document.text for document in documents], add_special_tokens=False)
    ids = [token_id for encoding in encodings for token_id in (*separator, *encoding.ids)]
    return np.array(ids + separator, dtype=np.uint32)


class Batches:
    """Draws windows from library text, and every fifth window from test text.

    Raises ValueError if the library text is shorter than a window."""

    def __init__(self, tokenizer: Tokenizer, corpus: Corpus, seed: int = 0) -> None:
        self._library = pack(tokenizer, corpus.library)
        self._tests = pack(tokenizer, corpus.tests)
        self._offset = np.random.default_rng(seed).random()

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all text, tests included."""
        return len(self._library) + len(self._tests)

    @property
    def largest_id(self) -> int:
        return int(max(text.max(initial=0) for text in (self._library, self._tests)))

    def draw(self, first_token: int, num_tokens: int, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [num_tokens // length, length], of the batch that follows `first_token`."""
        first = first_token // length
        windows = [self._window(number, length) for number in range(first, first + max(1, num_tokens // length))]
        token_ids = torch.from_numpy(np.stack(windows).astype(np.int64))
        return token_ids[:, :-1], token_ids[:, 1:]

    def _window(self, number: int, length: int) -> np.ndarray:
        from_tests = number % _TESTS_EVERY == 0 and len(self._tests) > length
        text = self._tests if from_tests else self._library
        if len(text) <= length:
            raise ValueError(f"the corpus has {len(text)} tokens, a window needs {length + 1}")
        start = int((self._offset + number * _GOLDEN) % 1.0 * (len(text) - length))
        return text[start : start + length + 1]
