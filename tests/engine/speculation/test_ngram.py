"""Prompt lookup against a search that reads everything, and its bounds."""

import random

import pytest

from baton.engine.speculation.proposers import ngram
from baton.engine.speculation.proposers.ngram import MAX_MATCH, MIN_MATCH, NgramProposer
from baton.engine.speculation.proposers.proposer import Draftee, DraftRequest
from tests.support.engine.toy_engine import engine_request


def proposer_and_draftee(token_ids):
    proposer = NgramProposer(4, 4096)
    draftee = Draftee(engine_request("a", token_ids or [0]), 0, token_ids)
    proposer.open(draftee)
    return proposer, draftee


def longest_match(token_ids) -> tuple[int, int]:
    """(position behind it, length), of equal lengths the latest; by brute force."""
    best, best_length = -1, 0
    for end in range(len(token_ids) - 1, MIN_MATCH - 1, -1):
        length = 0
        while length < min(end, MAX_MATCH) and token_ids[end - 1 - length] == token_ids[len(token_ids) - 1 - length]:
            length += 1
        if length >= MIN_MATCH and length > best_length:
            best, best_length = end, length
    return best, best_length


@pytest.mark.parametrize("alphabet", [2, 4, 12])
@pytest.mark.parametrize("seed", range(4))
def test_finds_the_longest_match(alphabet, seed, monkeypatch):
    monkeypatch.setattr(ngram, "MAX_CANDIDATES", 10_000)
    chance = random.Random(seed)
    tokens = [chance.randrange(alphabet) for _ in range(chance.randint(0, 5))]
    proposer, draftee = proposer_and_draftee(tokens)
    for _ in range(250):
        tokens += [chance.randrange(alphabet) for _ in range(chance.randint(1, 4))]
        width = chance.randint(1, 16)
        (draft,) = proposer.propose([DraftRequest(draftee, width)])
        begin, length = longest_match(tokens)
        if begin < 0:
            assert draft == []
            continue
        continued = list(tokens)
        while len(continued) < len(tokens) + len(draft):  # what repeats itself is unrolled
            continued.append(continued[begin + len(continued) - len(tokens)])
        assert len(draft) == min(width, 2 * length)
        assert draft == continued[len(tokens) :]


def test_a_long_prompt_is_read_a_piece_at_a_time():
    tokens = list(range(5000)) + [7, 8, 9]
    proposer, draftee = proposer_and_draftee(tokens)
    assert proposer.propose([DraftRequest(draftee, 4)]) == [[]]
    assert draftee.state.num_tokens == ngram.READ_TOKENS
    proposer.propose([DraftRequest(draftee, 4)])
    assert proposer.propose([DraftRequest(draftee, 4)]) == [[10, 11, 12, 13]]
    proposer.close(draftee)
    assert draftee.state is None


def test_a_sequence_beyond_the_window_is_read_anew(monkeypatch):
    monkeypatch.setattr(ngram, "WINDOW_TOKENS", 100)
    tokens = [index % 50 for index in range(150)]
    proposer, draftee = proposer_and_draftee(tokens)
    for index in range(150, 600):
        tokens.append(index % 50)
        assert proposer.propose([DraftRequest(draftee, 2)]) == [[(index + 1) % 50, (index + 2) % 50]]
        assert len(draftee.state.links) <= 200
    assert proposer.num_bytes > 0
