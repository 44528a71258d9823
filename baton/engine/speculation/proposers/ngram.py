"""Prompt lookup: what followed the longest earlier occurrence of a sequence's last tokens.

The index is that of LZ77 coders: the latest position behind every MIN_MATCH tokens, and from each position a link to
the one before with the same tokens. A token is entered in constant time; a lookup walks at most MAX_CANDIDATES links
and compares at most MAX_MATCH tokens at each. The longest match wins, of equals the latest.
"""

from collections.abc import Sequence

from baton.engine.speculation.proposers.proposer import Draftee, DraftRequest, Proposer

MIN_MATCH = 3
MAX_MATCH = 32
MAX_CANDIDATES = 16
ENTRY_BYTES = 240  # measured: a key of three ids in a dict, and its link
WINDOW_TOKENS = 32_768  # the latest ones of a sequence
READ_TOKENS = 2_048  # entered by one call; the rest waits for the next calls (about 0.4 us a token)


class Index:
    """Index the tokens [0, num_tokens) of one sequence."""

    __slots__ = ("last", "links", "num_tokens", "begin")

    def __init__(self, begin: int):
        self.begin = begin  # older tokens are left out
        self.num_tokens = begin
        self.last: dict[tuple[int, ...], int] = {}  # MIN_MATCH tokens -> the position after them
        self.links: list[int] = []  # from position begin + i to an earlier one; -1: none

    def read(self, token_ids: list[int], upto: int) -> None:
        """Enter token_ids[num_tokens:upto]."""
        last, links = self.last, self.links
        for position in range(self.num_tokens + 1, upto + 1):
            if position - self.begin < MIN_MATCH:
                links.append(-1)
                continue
            key = tuple(token_ids[position - MIN_MATCH : position])
            links.append(last.get(key, -1))
            last[key] = position
        self.num_tokens = max(self.num_tokens, upto)

    def find(self, token_ids: list[int], end: list[int]) -> tuple[int, int]:
        """Return (position in token_ids after the best earlier match of the last tokens of `end`, its length), or (-1,
        0) without one. All of token_ids is entered; `end` is token_ids or another text."""
        if end is token_ids:
            candidate = self.links[-1] if self.links else -1
        else:
            candidate = self.last.get(tuple(end[-MIN_MATCH:]), -1)
        num_tokens, best, best_length = len(end), -1, 0
        for _ in range(MAX_CANDIDATES):
            if candidate < 0:
                break
            length = MIN_MATCH
            longest = min(MAX_MATCH, candidate - self.begin, num_tokens)
            while length < longest and token_ids[candidate - length - 1] == end[num_tokens - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = candidate, length
                if length == MAX_MATCH:
                    break
            candidate = self.links[candidate - self.begin - 1]
        return best, best_length


def read_on(index: Index, token_ids: list[int]) -> Index:
    """Enter the new tokens, at most READ_TOKENS; return the index, or a new one of the last WINDOW_TOKENS."""
    if len(token_ids) - index.begin > 2 * WINDOW_TOKENS:
        index = Index(len(token_ids) - WINDOW_TOKENS)
    index.read(token_ids, min(len(token_ids), index.num_tokens + READ_TOKENS))
    return index


def continuation(token_ids: list[int], begin: int, length: int, num_tokens: int) -> list[int]:
    """Return at most `num_tokens` after a match of `length` that ends before `begin`; none if `length` is 0."""
    # A long match is likely to go on for long. A text that repeats within the proposal is unrolled.
    num_tokens = min(num_tokens, 2 * length)
    draft = token_ids[begin : begin + num_tokens]
    while len(draft) < num_tokens:
        draft += draft[: num_tokens - len(draft)]
    return draft


class NgramProposer(Proposer):
    """Propose by lookup, as the module describes. It needs no model, and proposes nothing if no text repeats."""

    name = "ngram"
    is_quick = True

    def __init__(self, max_num_seqs: int, max_model_len: int):
        self._num_bytes = max_num_seqs * min(max_model_len, 2 * WINDOW_TOKENS) * ENTRY_BYTES

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def open(self, draftee: Draftee) -> None:
        draftee.state = Index(max(0, len(draftee.token_ids) - WINDOW_TOKENS))

    def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._propose(draftee, num_tokens) for draftee, num_tokens in asks]

    def _propose(self, draftee: Draftee, num_tokens: int) -> list[int]:
        token_ids = draftee.token_ids
        draftee.state = index = read_on(draftee.state, token_ids)
        if index.num_tokens < len(token_ids):
            return []
        return continuation(token_ids, *index.find(token_ids, token_ids), num_tokens)

    def close(self, draftee: Draftee) -> None:
        draftee.state = None
