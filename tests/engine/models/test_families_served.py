"""What every family walks through: batched and chunked, from the cache, preempted, handed over, migrated and
speculated, bit for bit as alone. A family joins by its line in tests/support/model_folders/families.py."""

import random
from dataclasses import replace

import pytest

from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.handover import check_handed_over, hand_over
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import SERVED, VARIANTS, make_folder, random_ids

GIVEN = 9  # tokens of an answer, when it migrates
SAMPLED = dict(temperature=0.9, top_k=50, top_p=0.95, logprobs=1)
SHARED = random_ids(140, 1)
WIDE = dict(hidden_size=64)  # whose heads the native kernels take


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.long) if name in VARIANTS else name for name in SERVED], scope="module"
)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_folder(folder, request.param, **WIDE)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """Every request's answer with an engine to itself."""
    return {
        request.key: run_to_end(load(folder, max_num_batched_tokens=512), [request])[request.key] for request in mix()
    }


def load(folder, **options) -> Engine:
    defaults = dict(block_size=16, num_blocks=96, max_num_seqs=6, max_num_batched_tokens=90, threads=1)
    return Engine.load(EngineConfig(folder, **(defaults | options)))


def mix() -> list:
    """Greedy and seeded, short and long, two with a prefix in common, one that repeats its prompt."""
    few = tuple((token_id, 25.0) for token_id in range(3, 6))
    return [
        engine_request("greedy", random_ids(70, 2), 24, logprobs=2),
        engine_request("short", random_ids(3, 3), 30, logprobs=0),
        engine_request("shared", SHARED + random_ids(20, 4), 16, logprobs=1),
        engine_request("sampled", SHARED + random_ids(31, 5), 20, seed=7, **SAMPLED),
        engine_request("repetitive", random_ids(40, 6), 40, logit_bias=few, logprobs=0),
    ]


def again(requests: list, attempt: int) -> list:
    return [replace(request, key=request.key._replace(attempt=attempt)) for request in requests]


def check(records: Collector, requests: list, alone: dict) -> None:
    for request in requests:
        record, expected = records[request.key], alone[request.key._replace(attempt=0)]
        assert not record.ended.error, record.ended.message
        assert record.answer() == expected.answer(), request.key
        assert record.logprobs == expected.logprobs, f"{request.key}: logprobs differ in their bits"


def test_batched_chunked_and_from_the_cache(folder, alone):
    engine, requests = load(folder), mix()
    records = Collector()
    chance = random.Random(1)
    for request in requests:
        engine.submit(request)
        for _ in range(chance.randint(0, 3)):
            records.take(engine.step())
    check(run_to_end(engine, collector=records), requests, alone)
    second = again(requests, 1)
    records = run_to_end(engine, second)
    check(records, second, alone)
    assert sum(records[request.key].first.num_cached_tokens for request in second) >= 64 + 128 + 128


def test_preempted_and_back(folder):
    """More is admitted than fits: short answers have made the engine expect more of them."""
    requests = [engine_request(f"long{seed}", random_ids(20, seed), 50, logprobs=0) for seed in range(4)]
    expected = {request.key: run_to_end(load(folder), [request])[request.key] for request in requests}
    engine = load(folder, num_blocks=15)
    for seed in range(20):
        run_to_end(engine, [engine_request(f"short{seed}", random_ids(5, seed), 2)])
    records = run_to_end(engine, requests)
    assert sum(records[request.key].ended.report.num_preemptions for request in requests) > 0
    check(records, requests, expected)


def test_decode_after_handoff_equals_whole(folder, alone):
    requests = mix()
    firsts, rest = hand_over(load(folder), load(folder), requests)
    for request in requests:
        check_handed_over(firsts, rest, request, alone[request.key])


def test_another_engine_continues_an_answer(folder, alone):
    """Another engine goes on behind the tokens that have been given out, in another batch."""
    requests, engine = mix(), load(folder)
    moved = []
    for request in requests:
        token_ids = [*request.token_ids, *alone[request.key].tokens[0][:GIVEN]]
        going = engine_request(
            request.key.request_id, token_ids, request.max_tokens, 6, num_prompt_tokens=len(request.token_ids)
        )
        moved.append(replace(going, sampling=request.sampling))
    records = run_to_end(engine, moved, Collector(first_index=GIVEN))
    for request in requests:
        record, expected = records[request.key._replace(attempt=6)], alone[request.key]
        assert record.tokens[0] == expected.tokens[0][GIVEN:] and record.reasons == expected.reasons
        assert record.logprobs[0] == expected.logprobs[0][GIVEN:], f"{request.key}: logprobs differ in their bits"


def test_speculation_does_not_change_answers(folder, alone):
    requests = again(mix(), 3)
    engine = load(folder, speculator="ngram", num_draft_tokens=4)
    check(run_to_end(engine, requests), requests, alone)
    assert engine.load_report().num_accepted_tokens > 0


def test_bf16_rows_do_not_depend_on_their_batch(folder):
    """Logits of a prompt read alone and in pieces beside others."""
    engine = load(folder, dtype="bf16", max_num_batched_tokens=200)
    pieces = load(folder, dtype="bf16", max_num_batched_tokens=75)
    requests = mix()
    expected = {request.key: run_to_end(engine, [request])[request.key] for request in again(requests, 5)}
    check(run_to_end(pieces, requests), requests, {key._replace(attempt=0): record for key, record in expected.items()})
