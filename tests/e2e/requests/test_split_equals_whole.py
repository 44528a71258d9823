"""The answer of prefill worker + transfer + decode worker is the answer of one Engine, token for token."""

import pytest

from tests.support import bare_engine
from tests.support.bare_engine import assert_same
from tests.support.client import make_request
from tests.support.models import EOS_IDS

LENGTHS = (1, 31, 64, 65, 150, 300)  # less than a block, a block, a span, one over, with a tail, several chunks
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 11},
    "filtered": {"temperature": 1.3, "seed": 12, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.8,
        "seed": 13,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "choices": {"temperature": 1.0, "seed": 14, "n": 3, "logprobs": 1},
}
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def engine(model):
    return bare_engine.load_engine(model, num_blocks=160, threads=1)


@pytest.fixture(params=["shm", "tcp", "local"])
def any_client(request):
    """The same questions to a stack on each transport, and to a decode worker that prefills for itself."""
    return request.getfixturevalue({"shm": "client", "tcp": "tcp_client", "local": "local_client"}[request.param])


@pytest.fixture(scope="module")
def questions(prompts):
    """(name, prompt ids, sampling): every length greedy, every sampling at one length."""
    cases = [(f"greedy-{length}", prompts(length), SAMPLING["greedy"]) for length in LENGTHS]
    return cases + [(name, prompts(100), sampling) for name, sampling in SAMPLING.items()]


@pytest.fixture(scope="module")
def answers(engine, questions):
    """Return the answers of the bare engine, one request at a time: choices by index, by name."""
    found = {}
    for name, prompt_ids, sampling in questions:
        request = bare_engine.bare_request(name, prompt_ids, max_tokens=MAX_TOKENS, eos_ids=EOS_IDS, **sampling)
        found |= bare_engine.serve_alone(engine, [request])
    return found


def test_one_by_one(any_client, questions, answers):
    for name, prompt_ids, sampling in questions:
        reply = any_client.generate(prompt_ids, max_tokens=MAX_TOKENS, **sampling)
        assert_same(reply, answers[name])
        assert reply.usage.prompt_tokens == len(prompt_ids)
        assert reply.usage.output_tokens == sum(len(choice.token_ids) for choice in reply.choices.values())


def test_all_at_once(any_client, questions, answers):
    """Twice over: the second time the prompts are cached in whole or in part."""
    requests = [make_request(ids, max_tokens=MAX_TOKENS, **sampling) for _, ids, sampling in questions * 2]
    for (name, _, _), reply in zip(questions * 2, any_client.generate_many(requests), strict=True):
        assert_same(reply, answers[name])


def test_complete_is_the_same(any_client, questions, answers):
    name, prompt_ids, sampling = questions[-1]
    answer = any_client.stub.Complete(make_request(prompt_ids, max_tokens=MAX_TOKENS, **sampling), timeout=60)
    assert {choice.index: list(choice.token_ids) for choice in answer.choices} == {
        index: choice.token_ids for index, choice in answers[name].items()
    }
    assert answer.usage.prompt_tokens == len(prompt_ids) and answer.timing.ttft_s > 0


def test_the_prompt_is_read_on_the_prefill_worker(client, prompts, probes):
    """Without this the comparison above would prove nothing: the prefill worker stepped, and KV was transferred."""
    probes["prefill0"].wait_idle()
    before = probes["prefill0"].load().step
    reply = client.generate(prompts(300), max_tokens=4, temperature=0.0)
    assert reply.timing.transfer_s > 0
    probes["prefill0"].wait_idle()
    assert probes["prefill0"].load().step > before


def test_an_unset_seed_is_drawn_and_replays(client, prompts):
    prompt_ids = prompts(40)
    first = client.generate(prompt_ids, max_tokens=8, temperature=1.0)
    again = client.generate(prompt_ids, max_tokens=8, temperature=1.0, seed=first.seed)
    other = client.generate(prompt_ids, max_tokens=8, temperature=1.0)
    assert again.outcome() == first.outcome()
    assert other.seed != first.seed


def test_a_prefix_hit_changes_nothing(client, prompts):
    prompt_ids = prompts(260)
    cold = client.generate(prompt_ids, max_tokens=8, temperature=0.0, logprobs=2)
    hit = client.generate(prompt_ids, max_tokens=8, temperature=0.0, logprobs=2)
    longer = client.generate(prompt_ids + cold.token_ids, max_tokens=4, temperature=0.0)
    assert cold.usage.cached_tokens == 0 and hit.usage.cached_tokens >= 256 - 64
    assert longer.usage.cached_tokens >= 192
    assert hit.outcome() == cold.outcome()
