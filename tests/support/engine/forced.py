"""A proposer that knows the answer and is right as often as it is set to be: what speculation costs, acceptance
given."""

import random
from collections.abc import Mapping, Sequence

import torch

from baton.engine.core.request import Key
from baton.engine.speculation.proposers.proposer import Advance, Draftee, DraftRequest, Proposer


class ForcedProposer(Proposer):
    """Each proposal is the true token with this probability, else another one; then it continues as if it were true."""

    name = "forced"

    def __init__(self, answers: Mapping[tuple[str, int], Sequence[int]], probability: float, vocab_size: int):
        """`answers`: by (request id, choice) the whole output, from the end of the prompt on."""
        self.answers, self.probability, self.vocab_size = answers, probability, vocab_size
        self.chance = random.Random(0)
        self.live: set[Draftee] = set()
        self.advances: list[Advance] = []
        self.hidden: list[torch.Tensor | None] = []

    @property
    def num_bytes(self) -> int:
        return 0

    def open(self, draftee: Draftee) -> None:
        assert draftee not in self.live
        self.live.add(draftee)

    def close(self, draftee: Draftee) -> None:
        self.live.remove(draftee)

    def advance(self, advances, hidden) -> None:
        assert {advance.draftee for advance in advances} <= self.live
        self.advances += advances
        self.hidden.append(hidden)

    def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        drafts = []
        for draftee, num_tokens in asks:
            assert draftee in self.live and num_tokens >= 1
            answer = self.answers[draftee.request.key.request_id, draftee.choice]
            num_output = len(draftee.token_ids) - draftee.request.num_prompt_tokens
            true = list(answer[num_output : num_output + num_tokens])
            # Behind the end of the answer nothing could be right.
            true += [self.chance.randrange(self.vocab_size) for _ in range(num_tokens - len(true))]
            drafts.append([self._maybe(token_id) for token_id in true])
        return drafts

    def _maybe(self, token_id: int) -> int:
        if self.chance.random() < self.probability:
            return token_id
        return (token_id + 1 + self.chance.randrange(self.vocab_size - 1)) % self.vocab_size


def answers_of(records: Mapping[Key, object]) -> dict[tuple[str, int], list[int]]:
    """Return the answers in the records of a Collector of plain decoding."""
    return {(key.request_id, choice): made for key, record in records.items() for choice, made in record.tokens.items()}
