"""Lookup in a sequence and in its tenant's earlier answers: propose what followed the longest earlier occurrence of the
sequence's suffix (as SuffixDecoding, Oliaro et al., arXiv 2411.04975, with the index of prompt lookup instead of a
tree).

Agents, templates and repeated questions lead to answers that come again, after prompts that do not contain them. The
last answers of a tenant are kept, as tokens, in this process alone. They are never proposed to another tenant, so
nobody's speed reveals the answers of others. A match in the sequence wins over an equally long one in an answer. An
answer that ends before the proposer is asked for it is not kept.
"""

from collections.abc import Sequence

from baton.engine.speculation.proposers.ngram import (
    ENTRY_BYTES,
    MIN_MATCH,
    WINDOW_TOKENS,
    Index,
    continuation,
    read_on,
)
from baton.engine.speculation.proposers.proposer import Draftee, DraftRequest, Proposer

KEPT_TOKENS = 262_144  # for all tenants together
TENANT_TOKENS = 32_768  # in one Answers; a tenant has two
ANSWER_TOKENS = 4_096  # of one answer, its end: all sequences wait while they are entered (about 0.4 us each)
# Of a sequence that is opened again: a proposer that rests is asked again after so many tokens at the latest.
REOPENED_TOKENS = 128
_END = -1  # ends an answer


class Answers:
    """Hold answers of one tenant, one after the other."""

    def __init__(self):
        self.token_ids: list[int] = []
        self._index = Index(0)

    def add(self, token_ids: Sequence[int]) -> None:
        """Append an answer."""
        self.token_ids += token_ids
        self.token_ids.append(_END)
        self._index.read(self.token_ids, len(self.token_ids))

    def find(self, end: list[int]) -> tuple[int, int]:
        """Return (position after the best match of the last tokens of `end`, its length), or (-1, 0) without one."""
        return self._index.find(self.token_ids, end)

    def continuation(self, begin: int, length: int, num_tokens: int) -> list[int]:
        """Return at most `num_tokens` after a match, up to the end of the answer."""
        draft = self.token_ids[begin : begin + min(num_tokens, 2 * length)]
        return draft[: draft.index(_END)] if _END in draft else draft


class EarlierAnswers:
    """Hold the last answers of each tenant, and evict those of the tenant whose last answer is oldest."""

    def __init__(self):
        self._tenants: dict[bytes, list[Answers]] = {}  # newest Answers first; the tenant answered last comes last
        self.num_tokens = 0

    def of(self, tenant: bytes) -> Sequence[Answers]:
        """Return the answers of a tenant, the newest first."""
        return self._tenants.get(tenant, ())

    def add(self, tenant: bytes, token_ids: Sequence[int]) -> None:
        """Keep an answer, or the part of it not kept yet; only the end of a very long one."""
        token_ids = token_ids[-ANSWER_TOKENS:]
        kept = self._tenants.pop(tenant, None) or [Answers()]
        if kept[0].token_ids and len(kept[0].token_ids) + len(token_ids) >= TENANT_TOKENS:
            self.num_tokens -= sum(len(each.token_ids) for each in kept[1:])
            kept = [Answers(), kept[0]]
        kept[0].add(token_ids)
        self.num_tokens += len(token_ids) + 1
        self._tenants[tenant] = kept
        while self.num_tokens > KEPT_TOKENS and len(self._tenants) > 1:
            least_recent = self._tenants.pop(next(iter(self._tenants)))
            self.num_tokens -= sum(len(each.token_ids) for each in least_recent)


class LookupState:
    """Hold the lookup state of a sequence."""

    __slots__ = ("index", "num_kept")

    def __init__(self, index: Index, num_kept: int):
        self.index = index
        self.num_kept = num_kept  # tokens that are not of its answer, or are kept already


class SuffixProposer(Proposer):
    """Propose by lookup in earlier answers, as the module describes."""

    name = "suffix"
    is_quick = True

    def __init__(self, max_num_seqs: int, max_model_len: int):
        self.earlier = EarlierAnswers()
        num_tokens = max_num_seqs * min(max_model_len, 2 * WINDOW_TOKENS) + KEPT_TOKENS
        self._num_bytes = num_tokens * ENTRY_BYTES

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def open(self, draftee: Draftee) -> None:
        num_tokens, num_prompt = len(draftee.token_ids), draftee.request.num_prompt_tokens
        # A sequence that returns after it was parked or preempted was kept up to there, except for a part that is
        # entered twice.
        num_kept = max(num_prompt, num_tokens - 1 - REOPENED_TOKENS)
        draftee.state = LookupState(Index(max(0, num_tokens - WINDOW_TOKENS)), num_kept)

    def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._propose(draftee, num_tokens) for draftee, num_tokens in asks]

    def _propose(self, draftee: Draftee, num_tokens: int) -> list[int]:
        token_ids, state = draftee.token_ids, draftee.state
        state.index = index = read_on(state.index, token_ids)
        begin, length = index.find(token_ids, token_ids) if index.num_tokens == len(token_ids) else (-1, 0)
        best: Answers | None = None
        for answers in self.earlier.of(draftee.request.tenant_mark):
            found, found_length = answers.find(token_ids)
            if found_length > length:
                best, begin, length = answers, found, found_length
        if best is not None:
            return best.continuation(begin, length, num_tokens)
        return continuation(token_ids, begin, length, num_tokens)

    def close(self, draftee: Draftee) -> None:
        answer = draftee.token_ids[draftee.state.num_kept :]
        if len(answer) > MIN_MATCH:
            self.earlier.add(draftee.request.tenant_mark, answer)
        draftee.state = None
