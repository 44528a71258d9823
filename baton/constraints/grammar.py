"""Grammars over one vocabulary: compiled once, with a cursor for each answer. A cursor is a pure function of the
grammar and the token ids so far, so a worker that has both continues where another has stopped."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from baton.constraints.constraint import MAX_TOKEN_IDS, BadConstraint, Constraint, grammar_of
from baton.lines import one_line

# A token that no model has. Its bit says that the grammar may end here, whatever stop tokens the model has.
END = "<|end of the grammar|>"
_EMPTY_MASK = "NoExtensionBias"  # the library's message when no token may be next
_NO_TEXT = "no text of this vocabulary keeps to it"
WORD_BITS = 32
_OVERLAP = "oneOf of schemas that may overlap is not supported: give anyOf, or each a property with a const of its own"


class Vocabulary:
    """The token ids of one model, as grammars see them. It is immutable, so threads may share it."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int):
        """Read the tokenizer. `vocab_size` is the model's, which may be smaller or larger than the tokenizer's. Raises
        ValueError for a tokenizer whose tokens have no bytes of their own."""
        self.vocab_size = vocab_size
        try:
            tokenizer = Tokenizer.from_buffer(tokenizer_json)
            if (most := max(tokenizer.get_vocab().values(), default=0)) >= MAX_TOKEN_IDS:
                raise ValueError(f"a token has id {most}, at most {MAX_TOKEN_IDS - 1} is believed")
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.add_special_tokens([AddedToken(END, special=True)])
            self.end_id = cast(int, tokenizer.token_to_id(END))  # just added
            self._tokenizer = LLTokenizer(tokenizer.to_str(), eos_token=self.end_id)
        except Exception as error:  # both libraries raise bare Exception
            raise ValueError(f"no grammars over this tokenizer: {one_line(error, 200)}") from None
        self.num_known_words = -(-self._tokenizer.vocab_size // WORD_BITS)  # words of a mask that the library writes
        self.num_words = max(self.num_known_words, -(-vocab_size // WORD_BITS))

    def compile(self, constraint: Constraint) -> "Grammar":
        """Return the grammar of a constraint. It takes up to seconds and lets other threads run. Raises
        BadConstraint."""
        limits = LLParserLimits(verbose_errors=False, precompute_large_lexemes=False)
        matcher = LLMatcher(self._tokenizer, grammar_of(constraint), log_level=0, limits=limits)
        if matcher.is_error():
            raise BadConstraint("", _message(matcher.get_error()))
        cursor, mask = GrammarCursor(self, matcher.deep_copy()), self.new_masks(1)[0]
        if not cursor.fill(mask) or not mask.any():  # endless recursion, or bounds that leave nothing
            raise BadConstraint("", cursor.problem or _NO_TEXT)
        return Grammar(self, matcher)

    def new_masks(self, num_masks: int) -> np.ndarray:
        """Return empty masks int32 [num_masks, num_words]."""
        return np.zeros((num_masks, self.num_words), dtype=np.int32)


class Grammar:
    """A compiled constraint."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher):
        self.vocabulary, self._matcher = vocabulary, matcher

    def cursor(self) -> "GrammarCursor":
        """Return a cursor at the beginning of an answer."""
        return GrammarCursor(self.vocabulary, self._matcher.deep_copy())


class GrammarCursor:
    """A position in a grammar: after the tokens that it has read."""

    __slots__ = ("num_read", "_matcher", "_vocabulary", "may_end")

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, num_read: int = 0):
        self.num_read = num_read
        self.may_end = False  # at the last mask
        self._vocabulary, self._matcher = vocabulary, matcher

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""
        return _is_over(self._matcher)

    @property
    def problem(self) -> str:
        """Why the grammar cannot be followed any further; "" if it can."""
        return _message(self._matcher.get_error()) if self._matcher.is_error() else ""

    def read(self, token_ids: Sequence[int], begin: int = 0) -> None:
        """Advance past the tokens of the answer, token_ids[begin:], of which the first `num_read` were read before."""
        if len(token_ids) - begin > self.num_read:
            self._matcher.consume_tokens(list(token_ids[begin + self.num_read :]))
            self.num_read = len(token_ids) - begin

    def advance(self, token_id: int) -> bool:
        """Advance past the next token of the answer; return whether another may follow."""
        self._matcher.consume_token(token_id)
        self.num_read += 1
        return not self._matcher.is_stopped()

    def is_over_behind(self, token_id: int) -> bool:
        """Return whether nothing may follow `token_id` if it is the next token."""
        following = self._matcher.deep_copy()
        following.consume_token(token_id)
        return _is_over(following)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may follow one another; any ids are accepted."""
        # An id that the library does not know would be an error, from which there is no way back.
        known = list(takewhile(lambda token_id: token_id < self._vocabulary.end_id, token_ids))
        return self._matcher.validate_tokens(known) if known else 0

    def fill(self, mask: np.ndarray) -> bool:
        """Set the bits of the tokens that may be next in `mask`, int32 [num_words], and record whether the answer may
        end. Return whether the grammar could be followed so far."""
        vocabulary = self._vocabulary
        if self._matcher.is_error():
            return False
        mask[vocabulary.num_known_words :] = 0
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, 4 * vocabulary.num_known_words)
        if self._matcher.is_error():
            return False
        word, bit = divmod(vocabulary.end_id, WORD_BITS)
        words = mask.view(np.uint32)
        self.may_end = bool(words[word] >> bit & 1) and self._matcher.is_accepting()
        words[word] &= ~np.uint32(1 << bit)
        first, bit = divmod(vocabulary.vocab_size, WORD_BITS)
        if first < len(words):  # ids that the tokenizer knows and the model does not
            words[first] &= np.uint32((1 << bit) - 1)
            words[first + 1 :] = 0
        return True

    def behind(self, token_ids: Sequence[int]) -> Iterator["GrammarCursor"]:
        """Yield the cursor after each of these tokens, which must be allowed one after the other."""
        matcher = self._matcher
        for index, token_id in enumerate(token_ids, 1):
            matcher = matcher.deep_copy()
            matcher.consume_token(token_id)
            yield GrammarCursor(self._vocabulary, matcher, self.num_read + index)


def _is_over(matcher: LLMatcher) -> bool:
    """Return whether nothing may follow. A matcher with an error has stopped too, but is not over."""
    return matcher.is_stopped() and not matcher.is_error()


def _message(error: str) -> str:
    """Return the library's message without its drawing of the place, and without an option that does not exist here."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines()]
    kept = [line for line in lines if line and not line.startswith("^") and not line[:1].isdigit()] or lines
    message = one_line(" ".join(kept), 300)
    if message == _EMPTY_MASK:
        return _NO_TEXT
    return _OVERLAP if "coerce_one_of" in message else message
