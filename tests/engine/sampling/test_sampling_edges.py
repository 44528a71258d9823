"""Every sampling parameter at the edges that the gateway lets through, in every way the engine has to the same answer
(H14): nothing breaks, and the way does not show."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.speculation.proposers.ngram import NgramProposer
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import TOY_VOCAB, engine_request, toy_engine

PROMPT = [5, 6, 7, 8] * 25  # repeats, so that prompt lookup proposes something
WAYS = {
    "plain": lambda: toy_engine(),
    "prompt lookup": lambda: toy_engine(NgramProposer(4, 512), speculator="ngram"),
    "in chunks": lambda: toy_engine(max_num_batched_tokens=68, block_size=64),
    "tight": lambda: toy_engine(num_blocks=32),
}


def edges(*values) -> st.SearchStrategy:
    return st.sampled_from(values)


def parameters() -> st.SearchStrategy:
    shift = edges(0.0, 1e-45, -1e-45, 1000.0, -1000.0, 0.5)
    return st.fixed_dictionaries(
        {
            "temperature": edges(0.0, 1e-3, 1.0, 100.0),
            "top_k": edges(0, 1, TOY_VOCAB - 1, TOY_VOCAB, 2**32 - 1),
            "top_p": edges(1e-45, 1e-6, 0.5, 1.0),
            "min_p": edges(0.0, 1e-45, 0.5, 1.0),
            "seed": edges(0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
            "repetition_penalty": edges(1e-3, 1.0, 100.0),
            "presence_penalty": shift,
            "frequency_penalty": shift,
            "logit_bias": st.dictionaries(edges(0, 5, TOY_VOCAB - 1), edges(-1000.0, 1000.0, 0.0), max_size=3).map(
                lambda biases: tuple(biases.items())
            ),
            "n": edges(1, 2, 8),
            "logprobs": edges(None, 0, 20),
        }
    )


def answer(way: str, parameters: dict, min_tokens: int):
    request = engine_request(way, PROMPT, 6, min_tokens=min_tokens, stop_token_ids=frozenset([3]), **parameters)
    record = run_to_end(WAYS[way](), [request])[request.key]
    told = {choice: entries for choice, entries in record.logprobs.items() if entries}
    assert record.ended and len(record.tokens) == parameters["n"]
    assert all(0 <= token_id < TOY_VOCAB for tokens in record.tokens.values() for token_id in tokens)
    for entries in told.values():
        assert not any(math.isnan(value) for entry in entries for value in _numbers(entry))
    return record.answer()


def _numbers(entry) -> list[float]:
    return [entry.chosen[1], *(value for _, value in entry.top)]


@settings(max_examples=6)  # an engine for each way: about 2 s an example
@given(parameters=parameters(), min_tokens=edges(0, 6))
def test_all_ways_lead_to_one_answer(parameters, min_tokens):
    answers = {way: answer(way, parameters, min_tokens) for way in WAYS}
    assert all(each == answers["plain"] for each in answers.values()), answers
