"""Lookup in earlier answers: against a search that reads everything, by tenant, and within its bounds."""

import random
from dataclasses import replace

import pytest

from baton.engine.speculation.proposers import ngram, suffix
from baton.engine.speculation.proposers.ngram import MAX_MATCH, MIN_MATCH
from baton.engine.speculation.proposers.proposer import Draftee, DraftRequest
from baton.engine.speculation.proposers.suffix import REOPENED_TOKENS, EarlierAnswers, SuffixProposer
from tests.support.engine.toy_engine import engine_request


def opened(proposer: SuffixProposer, token_ids: list[int], tenant: bytes = b"") -> Draftee:
    """A sequence whose record is `token_ids`, all of them a prompt so far."""
    draftee = Draftee(replace(engine_request("a", list(token_ids)), tenant_mark=tenant), 0, token_ids)
    proposer.open(draftee)
    return draftee


def answered(proposer: SuffixProposer, prompt: list[int], answer: list[int], tenant: bytes = b"") -> None:
    token_ids = list(prompt)
    draftee = opened(proposer, token_ids, tenant)
    token_ids += answer
    proposer.close(draftee)


def proposed(proposer: SuffixProposer, draftee: Draftee, num_tokens: int = 16) -> list[int]:
    (draft,) = proposer.propose([DraftRequest(draftee, num_tokens)])
    return draft


def longest_match(texts: list[list[int]], end: list[int]) -> int:
    """The length of the longest suffix of `end` that some text has, before its last token; by brute force."""
    best = 0
    for text in texts:
        for stop in range(1, len(text)):
            length = 0
            while length < min(stop, len(end), MAX_MATCH) and text[stop - 1 - length] == end[len(end) - 1 - length]:
                length += 1
            best = max(best, length)
    return best if best >= MIN_MATCH else 0


@pytest.mark.parametrize("alphabet", [3, 12])
@pytest.mark.parametrize("seed", range(4))
def test_what_followed_the_longest_match_anywhere(alphabet, seed, monkeypatch):
    monkeypatch.setattr(ngram, "MAX_CANDIDATES", 10_000)
    chance, proposer, answers = random.Random(seed), SuffixProposer(4, 4096), []
    for _ in range(40):
        tokens = [chance.randrange(alphabet) for _ in range(chance.randint(1, 30))]
        draftee, num_prompt = opened(proposer, tokens), len(tokens)
        for _ in range(chance.randint(0, 12)):
            tokens += [chance.randrange(alphabet) for _ in range(chance.randint(1, 4))]
            draft, length = proposed(proposer, draftee), longest_match([*answers, tokens], tokens)
            texts = [tokens, *answers]
            if length:
                pattern = [*tokens[len(tokens) - length :], *draft[:1]]
                windows = (text[at : at + len(pattern)] for text in texts for at in range(len(text)))
                assert pattern in windows, "the first token proposed followed a match of that length"
            else:
                assert draft == []
        proposer.close(draftee)
        if len(answer := tokens[num_prompt:]) > MIN_MATCH:
            answers.append(answer)


def test_an_answer_that_comes_again_from_another_prompt():
    proposer = SuffixProposer(4, 4096)
    answered(proposer, [1, 2], list(range(100, 140)))
    draftee = opened(proposer, [7, 8, 9])
    draftee.token_ids += [100, 101, 102]
    assert proposed(proposer, draftee) == [103, 104, 105, 106, 107, 108], "twice as long as the match"
    draftee.token_ids += range(103, 136)
    assert proposed(proposer, draftee) == [136, 137, 138, 139], "up to the answer's end"


def test_prompts_are_not_kept():
    proposer = SuffixProposer(4, 4096)
    answered(proposer, list(range(100, 140)), [1, 2, 3, 4, 5])
    assert proposed(proposer, opened(proposer, [7, 100, 101, 102])) == []


def test_what_one_tenant_was_answered_is_not_proposed_to_another():
    proposer = SuffixProposer(4, 4096)
    answered(proposer, [1], list(range(100, 140)), b"a")
    for tenant, length in ((b"a", 6), (b"b", 0), (b"", 0)):
        draftee = opened(proposer, [7, 100, 101, 102], tenant)
        assert len(proposed(proposer, draftee)) == length


def test_a_requests_own_text_wins_where_another_is_no_longer():
    proposer = SuffixProposer(4, 4096)
    answered(proposer, [1], [5, 6, 7, 8])
    assert proposed(proposer, opened(proposer, [5, 6, 7, 9, 5, 6, 7]), 1) == [9]


def test_a_sequence_that_comes_back_is_kept_once():
    """It parks again and again, and little of what it has is entered anew; opened late, all that it has is."""
    proposer, tokens = SuffixProposer(4, 4096), [0, 1]
    draftee = opened(proposer, tokens)
    for token_id in range(2, 2_002):
        tokens.append(token_id)
        if token_id == 100 or token_id % 400 == 0:
            proposer.close(draftee)
            proposer.open(draftee)
    proposer.close(draftee)
    assert 2_000 < proposer.earlier.num_tokens <= 2_000 + 7 * (REOPENED_TOKENS + 2)
    late = opened(proposer, [7, 8])
    late.token_ids += range(5_000, 5_100)
    proposer.open(late)  # for the first time, 100 tokens in
    late.request = replace(late.request, num_prompt_tokens=2)
    proposer.close(late)
    assert proposed(proposer, opened(proposer, [5_000, 5_001, 5_002]), 1) == [5_003]


def test_few_tokens_are_kept_those_of_the_last_answers(monkeypatch):
    monkeypatch.setattr(suffix, "KEPT_TOKENS", 300)
    monkeypatch.setattr(suffix, "TENANT_TOKENS", 60)
    monkeypatch.setattr(suffix, "ANSWER_TOKENS", 50)
    chance, earlier = random.Random(3), EarlierAnswers()
    for _ in range(2_000):
        tenant, answer = bytes([chance.randrange(6)]), [chance.randrange(9) for _ in range(chance.randint(4, 70))]
        earlier.add(tenant, answer)
        held = {who: earlier.of(bytes([who])) for who in range(6)}
        assert earlier.num_tokens == sum(len(each.token_ids) for answers in held.values() for each in answers) <= 300
        assert earlier.of(tenant)[0].token_ids[-51:][-1 - len(answer) :] == [*answer[-50:], -1]
        assert all(len(each.token_ids) <= 60 for answers in held.values() for each in answers)
    assert sum(bool(answers) for answers in held.values()) > 2
