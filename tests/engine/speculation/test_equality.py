"""Speculated or not: the same tokens, finish reasons and logprobs, bit for bit, whatever shares the batch."""

import random
from dataclasses import replace

import pytest

from baton.engine import native
from baton.engine.core.request import Speculation
from baton.engine.execute import multi_step
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.handover import check_handed_over, hand_over
from tests.support.engine.serving import REPETITIVE, check_empty, check_same, num_accepted, serve, serve_parking
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.draft_models import load_draftable, make_target_and_draft, mixed_requests


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_target_and_draft(tmp_path_factory.mktemp("speculation"))


# A random model seldom repeats itself, unless few tokens are allowed.
LOOKUPS = ("ngram", "suffix")  # which need no model


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["draft", "ngram", "suffix", "auto"])
@pytest.mark.parametrize("width", [3, 8])
def test_mixed_batches(folders, dtype, name, width):
    target, draft = folders
    requests = mixed_requests(60, seed=width, **({} if name == "draft" else REPETITIVE))
    plain, _ = serve(load_draftable(target, dtype=dtype), requests)
    options = dict(speculator=name) | ({} if name in LOOKUPS else {"draft_model": draft})
    engine = load_draftable(target, dtype=dtype, num_draft_tokens=width, **options)
    some = [replace(r, speculation=Speculation("off")) if i % 7 == 0 else r for i, r in enumerate(requests)]
    records, _ = serve(engine, some)
    check_same(records, plain, plain)
    assert num_accepted(engine) > (30 if name in LOOKUPS else 100)
    assert all(records[some[i].key].ended.report.num_drafts == 0 for i in range(0, 60, 7))


def test_adaptive_width(folders):
    target, draft = folders
    requests = mixed_requests(60, max_tokens=60, seed=1)
    plain, _ = serve(load_draftable(target), requests)
    engine = load_draftable(target, speculator="auto", draft_model=draft)
    check_same(serve(engine, requests)[0], plain, plain)


def test_a_draft_that_is_the_target_is_always_right(folders):
    """Its KV of prompt and output is what it must be: greedy and seeded, beyond its window too."""
    target, _ = folders
    requests = mixed_requests(10, max_tokens=80, seed=2, stop_token_ids=frozenset())
    engine = load_draftable(target, speculator="draft", draft_model=target, num_draft_tokens=5)
    serve(engine, requests)
    counts = engine.speculator.counts["draft"]
    assert counts.num_drafts > 50
    assert sum(counts.accepted) >= 0.97 * sum(counts.proposed)  # two numerics: rows of a draft are not padded alike


@pytest.mark.parametrize("name", ["draft", "auto"])
def test_preempted_sequences_are_speculated_alike(folders, name):
    target, draft = folders
    requests = mixed_requests(16, max_tokens=150, seed=3)
    requests = [replace(request, max_tokens=150, stop_token_ids=frozenset()) for request in requests]
    plain, _ = serve(load_draftable(target), requests)
    engine = load_draftable(
        target, speculator=name, draft_model=draft, num_draft_tokens=6, num_blocks=40, max_num_seqs=6
    )
    records, _ = serve(engine, requests)
    assert sum(record.ended.report.num_preemptions for record in records.values()) > 2
    assert num_accepted(engine) > 100
    check_same(records, plain, plain)


def test_prefix_cache_and_the_next_turn(folders):
    target, draft = folders
    requests = [replace(r, max_tokens=90, stop_token_ids=frozenset()) for r in mixed_requests(8, seed=4)]
    engine = load_draftable(target, speculator="draft", draft_model=draft, num_draft_tokens=4)
    plain_engine = load_draftable(target)
    plain, _ = serve(plain_engine, requests)
    check_same(serve(engine, requests)[0], plain, plain)
    turns = [
        engine_request(f"next{index}", [*request.token_ids, *plain[request.key].tokens[0], 1, 2, 3], 30, logprobs=2)
        for index, request in enumerate(requests)
    ]
    again, _ = serve(engine, turns)
    fresh, _ = serve(load_draftable(target), turns)
    check_same(again, fresh, fresh)
    assert all(again[turn.key].first.num_cached_tokens >= 64 for turn in turns)


def test_cancels_leave_nothing_behind(folders):
    target, draft = folders
    requests = mixed_requests(60, max_tokens=50, seed=5)
    plain, _ = serve(load_draftable(target), requests)
    engine = load_draftable(target, speculator="auto", draft_model=draft, num_draft_tokens=7)
    records, cancelled = serve(engine, requests, random.Random(1), cancel=0.4)
    assert cancelled
    check_same(records, plain, set(plain) - cancelled)


def test_split_equals_whole(folders):
    """The prefill side knows nothing of speculation, and what is proposed on the decode side does not know of it."""
    target, draft = folders
    requests = mixed_requests(40, seed=6)
    plain, _ = serve(load_draftable(target), requests)
    decode = load_draftable(target, speculator="draft", draft_model=draft, num_draft_tokens=5)
    firsts, rest = hand_over(load_draftable(target), decode, requests)
    decode.step()
    check_empty(decode)
    for request in requests:
        check_handed_over(firsts, rest, request, plain[request.key])
    assert num_accepted(decode) > 50


def test_a_migrated_request_goes_on_with_speculation(folders):
    target, draft = folders
    requests = [replace(r, max_tokens=40) for r in mixed_requests(20, seed=7) if r.sampling.n == 1]
    plain, _ = serve(load_draftable(target), requests)
    moved = []
    for request in requests:
        made = plain[request.key].tokens[0]
        if len(made) > 10:
            token_ids = (*request.token_ids, *made[:8])
            moved.append(
                replace(engine_request(request.key.request_id, token_ids), num_prompt_tokens=len(request.token_ids),
                        sampling=request.sampling, max_tokens=40, min_tokens=request.min_tokens,
                        stop_token_ids=request.stop_token_ids)
            )  # fmt: skip
    engine = load_draftable(target, speculator="draft", draft_model=draft, num_draft_tokens=5)
    records = Collector(first_index=8)
    run_to_end(engine, moved, records)
    assert moved
    for request in moved:
        assert records[request.key].tokens[0] == plain[request.key].tokens[0][8:]


def test_parked_and_resumed(folders):
    """In mid-answer, again and again: what a proposer kept goes, and comes back from the tokens."""
    target, draft = folders
    requests = [replace(r, max_tokens=60) for r in mixed_requests(12, seed=9)]
    plain, _ = serve(load_draftable(target), requests)
    engine = load_draftable(target, speculator="auto", draft_model=draft, num_draft_tokens=4)
    check_same(serve_parking(engine, requests, random.Random(0)), plain, plain)
    assert num_accepted(engine) > 100


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_thousand_prompts(folders, dtype):
    target, draft = folders
    requests = mixed_requests(1000, max_tokens=48, seed=8)
    plain, _ = serve(load_draftable(target, dtype=dtype), requests)
    for options in (dict(num_draft_tokens=5), dict()):
        engine = load_draftable(target, dtype=dtype, speculator="auto", draft_model=draft, **options)
        check_same(serve(engine, requests)[0], plain, plain)


@pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())
@pytest.mark.parametrize("name", ["draft", "ngram", "auto"])
def test_what_proposes_nothing_leaves_calls_of_several_steps(folders, monkeypatch, name):
    """While all proposers rest, steps are as cheap as without them; the tokens are the same."""
    monkeypatch.setattr(multi_step, "BUDGET_NS", 10**15)
    target, draft = folders
    requests = [engine_request(str(n), [n + 3, 7, 9], 200, temperature=1.0, seed=n, named=False) for n in range(3)]
    plain = load_draftable(target, dtype="fp32")
    engine = load_draftable(
        target, dtype="fp32", speculator=name, **({} if name == "ngram" else {"draft_model": draft})
    )
    monkeypatch.setattr(type(engine.speculator.controller), "_best_width", lambda *arguments: 0)  # nothing pays
    expected, records = run_to_end(plain, requests), run_to_end(engine, requests)
    check_same(records, expected, expected)
    assert engine.speculator.controller.step <= engine.step_number
    calls, by_call = engine._multi_step._run, []
    monkeypatch.setattr(engine._multi_step, "_run", lambda *each: by_call.append(calls(*each)) or by_call[-1])
    run_to_end(engine, [engine_request("again", [3, 7, 9], 200, named=False)])
    assert sum(by_call) > 150 and max(by_call) >= 4, "200 tokens, most of them several at a time"
