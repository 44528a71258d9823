"""Decode steps in one native call, several or one with proposals, give what single steps give, and let nobody wait
longer than a step."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import failpoints
from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.core.request import PrefillDone, TokenRun
from baton.engine.engine import Engine
from baton.engine.execute import multi_step
from baton.engine.schedule.inbox import Stop
from baton.engine.speculation.control import controller
from tests.engine.sampling.sample_rows import any_params
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.serving import submit
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import make_adapter, make_folder, save_tiny

VOCAB = 256

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), VOCAB)


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    """A slow machine does as many steps as a fast one."""
    monkeypatch.setattr(multi_step, "BUDGET_NS", 10**15)


def load(folder, is_single: bool = False, **options) -> Engine:
    defaults = dict(block_size=16, num_blocks=128, max_num_seqs=6, max_num_batched_tokens=200, threads=1)
    engine = Engine.load(EngineConfig(model=folder, **(defaults | options)))
    assert engine._multi_step is not None
    if is_single:
        engine._multi_step = None
    return engine


@pytest.fixture(scope="module")
def engines(folder):
    """Return an engine that takes several steps in a call, and one that never does, for each dtype."""
    return {dtype: (load(folder, dtype=dtype), load(folder, True, dtype=dtype)) for dtype in ("fp32", "bf16")}


def prompt(num_tokens: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + index).randrange(VOCAB) for index in range(num_tokens)]


def check_alike(several: Engine, single: Engine, requests) -> None:
    calls = single.step_number, several.step_number
    found, expected = run_to_end(several, requests), run_to_end(single, requests)
    for request in requests:
        assert found[request.key].answer() == expected[request.key].answer()
        assert found[request.key].logprobs == expected[request.key].logprobs
        mine, theirs = (each[request.key].ended.report.num_steps for each in (found, expected))
        assert mine == theirs, "a step is a step, however many a call does"
    assert single.step_number - calls[0] == several.step_number - calls[1]
    assert several.ledger.num_available == several.num_blocks


def draw_requests(data, **fixed) -> list:
    """Return one to three, of any sampling but what is `fixed`."""
    seed, requests = data.draw(st.integers(0, 2**31)), []
    for index in range(data.draw(st.integers(1, 3))):
        stops = frozenset(random.Random(seed + index).sample(range(VOCAB), data.draw(st.sampled_from((0, 3, 30)))))
        requests.append(
            engine_request(
                f"{seed}-{index}",
                prompt(data.draw(st.integers(1, 40)), seed + index),
                data.draw(st.integers(1, 40)),
                named=False,
                stop_token_ids=stops,
                min_tokens=data.draw(st.sampled_from((0, 0, 5, 11))),
                **(data.draw(any_params) | dict(logprobs=data.draw(st.sampled_from((None, None, 0, 3)))) | fixed),
            )
        )
    return requests


@settings(max_examples=30)
@given(st.data())
def test_any_sampling_as_single_steps(engines, data):
    """Alone and together, with stops that come and ends that are banned until some tokens are there."""
    check_alike(*engines[data.draw(st.sampled_from(("fp32", "bf16")))], draw_requests(data))


@pytest.fixture(scope="module")
def speculating(folder):
    """As `engines`, each of which looks every prompt up and verifies four proposals a step, and none only to measure a
    plain one: single steps and calls of several have other ones to measure."""
    options = dict(speculator="ngram", num_draft_tokens=4)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(controller, "FIRST_PLAIN_INTERVAL", controller.NEVER)
        yield {
            dtype: (load(folder, dtype=dtype, **options), load(folder, True, dtype=dtype, **options))
            for dtype in ("fp32", "bf16")
        }


@settings(max_examples=30)
@given(st.data())
def test_any_sampling_verified_as_in_a_single_step(speculating, data):
    """Answers of few tokens, which repeat; what is accepted in a step is the same, and so are the steps."""
    few = tuple((token_id, 25.0) for token_id in range(3))
    engines = speculating[data.draw(st.sampled_from(("fp32", "bf16")))]
    check_alike(*engines, draw_requests(data, logit_bias=few))


def test_proposals_are_verified_in_the_call(folder, monkeypatch):
    """Nothing but the prompt is left to the runner."""
    engine, num_run = load(folder, speculator="ngram", num_draft_tokens=4), 0
    compute = engine.runner.run

    def counted(*arguments):
        nonlocal num_run
        num_run += 1
        return compute(*arguments)

    monkeypatch.setattr(engine.runner, "run", counted)
    run_to_end(engine, [engine_request("a", [1, 2, 3, 4, 5] * 6, 60, named=False, logit_bias=((1, 25.0), (2, 24.0)))])
    counts = engine.speculator.counts["ngram"]
    assert num_run == 1 and sum(counts.proposed) > 40 and sum(counts.accepted) > 20


@pytest.mark.parametrize("family", ["llama3.2-tied", "granite", "command-r", "qwen3-moe", "gemma2", "starcoder2"])
def test_families_as_single_steps(tmp_path, family):
    """Scales of embedding and logits; those with an end that is not native never take several."""
    path, options = tmp_path / family, dict(num_blocks=32, max_num_seqs=4, dtype="fp32")
    make_folder(path, family, hidden_size=64)
    several = Engine.load(EngineConfig(model=path, threads=1, **options))
    single = Engine.load(EngineConfig(model=path, threads=1, **options))
    assert (several._multi_step is None) == (family in ("command-r", "gemma2", "starcoder2"))
    single._multi_step = None
    requests = [engine_request(str(n), [n + 3, 7, 9], 30, temperature=n / 2, seed=n, named=False) for n in range(3)]
    check_alike(several, single, requests)


def test_adapters_as_single_steps(tmp_path):
    """Rows of two adapters, which take turns, and of none."""
    model = make_folder(tmp_path / "base", "llama3", hidden_size=64)
    for seed, name in enumerate("ab"):
        make_adapter(tmp_path / name, model, ["q_proj", "down_proj"], seed=seed)
    adapter = tuple(f"{name}={tmp_path / name}" for name in "ab")
    engines = [load(tmp_path / "base", is_single, adapter=adapter, dtype="fp32") for is_single in (False, True)]
    known = engines[0].adapters.listed()
    named = [known["a"], known["b"], b"", known["a"], known["b"]]
    requests = [engine_request(str(n), [n + 3, 7, 9], 30, named=False, adapter=each) for n, each in enumerate(named)]
    check_alike(*engines, requests)
    engines[0].submit(engine_request("alone", [3, 7, 9], 30, named=False, adapter=known["a"]))
    engines[0].step()
    assert len(engines[0].step()[0].token_ids) == 8


def test_a_call_takes_several_steps_and_ends_with_the_first_sequence(folder):
    engine, sizes = load(folder), []
    engine.submit(engine_request("long", prompt(5, 1), 30, named=False))
    engine.submit(engine_request("short", prompt(5, 2), 12, named=False))
    while engine.has_work():
        outputs = [output for output in engine.step() if isinstance(output, TokenRun)]
        sizes += [len(output.token_ids) for output in outputs if output.key.request_id == "long"]
    assert sizes == [8, 3, 8, 8, 2], "the first token is the prompt's"


def test_a_request_that_comes_meanwhile_waits_for_a_step(folder, monkeypatch):
    """Whatever is posted while a call computes ends it behind the step that runs."""
    engine = load(folder)
    engine.submit(engine_request("a", prompt(5, 1), 200, named=False))
    engine.step()
    assert len(engine.step()[0].token_ids) == 8
    late = engine._multi_step._run

    def call(*arguments):
        engine.submit(engine_request("b", prompt(5, 2), 4, named=False))  # once the commands of this step are obeyed
        return late(*arguments)

    monkeypatch.setattr(engine._multi_step, "_run", call)
    assert len(engine.step()[0].token_ids) == 1
    monkeypatch.setattr(engine._multi_step, "_run", late)
    outputs = engine.step()
    assert any(isinstance(output, PrefillDone) and output.key.request_id == "b" for output in outputs)


def test_a_budget_bounds_a_call(folder, monkeypatch):
    monkeypatch.setattr(multi_step, "BUDGET_NS", 0)
    engine = load(folder)
    engine.submit(engine_request("a", prompt(5, 1), 20, named=False))
    engine.step()
    assert [len(engine.step()[0].token_ids) for _ in range(3)] == [1, 1, 1]


def test_cancelled_between_calls_it_ends_at_once(folder):
    engine, request = load(folder), engine_request("a", prompt(5, 1), 200, named=False)
    engine.submit(request)
    for _ in range(3):
        engine.step()
    engine.cancel(request.key)
    records = run_to_end(engine, collector=Collector())
    assert records[request.key].ended.error == "cancelled" and engine.ledger.num_available == engine.num_blocks


def test_where_steps_are_hurt_each_is_one(folder, monkeypatch):
    monkeypatch.setattr(failpoints, "_board", failpoints._Board("engine.step=sleep:0"))
    engine = load(folder)
    engine.submit(engine_request("a", prompt(5, 1), 20, named=False))
    engine.step()
    assert [len(engine.step()[0].token_ids) for _ in range(4)] == [1] * 4


def test_logprobs_come_with_the_tokens_of_a_call(folder):
    engine = load(folder)
    engine.submit(engine_request("a", prompt(5, 1), 20, named=False, logprobs=2))
    engine.step()
    run = engine.step()[0]
    assert len(run.token_ids) == len(run.logprobs) == 8


def test_a_small_pool_preempts_as_with_single_steps(folder):
    """Blocks are taken ahead only where nobody else lacks them."""
    requests = [engine_request(str(n), prompt(30, n), 100, named=False) for n in range(6)]
    options, answers = dict(num_blocks=28, max_num_batched_tokens=100), []
    for is_single in (False, True):
        engine, records = load(folder, is_single, **options), Collector()
        for request in requests:
            submit(engine, request, records)
        run_to_end(engine, collector=records)
        assert sum(records[request.key].ended.report.num_preemptions for request in requests) > 0
        answers.append([records[request.key].answer() for request in requests])
    assert answers[0] == answers[1]


def test_what_was_decoded_feeds_the_next_turn(folder):
    """Units of a call's KV are named as those of single steps are."""
    engine, request = load(folder), engine_request("a", prompt(100, 1), 120)
    answer = run_to_end(engine, [request])[request.key].answer()[0][0]
    again = engine_request("b", [*request.token_ids, *answer, 1, 2], 4)
    assert run_to_end(engine, [again])[again.key].first.num_cached_tokens == 192


def test_the_work_of_several_steps_is_that_of_single_ones(folder, monkeypatch):
    sums: list[list[int]] = []
    for is_single in (False, True):
        engine = load(folder, is_single)
        run_to_end(engine, [engine_request("a", prompt(20, 1), 40, named=False)])
        sums.append([sum(column) for column in zip(*(row for _, row in engine.work._seconds), strict=True)])
    assert sums[0] == sums[1] and min(sums[0]) > 0


def test_the_bell_rings_until_commands_are_taken(folder):
    engine = load(folder)
    assert not engine.inbox._rung.value
    engine.inbox.post(Stop("nobody", 0))
    assert engine.inbox._rung.value
    assert len(list(engine.inbox.drain())) == 1 and not engine.inbox._rung.value


def test_threads_that_draw_side_by_side(tmp_path):
    """Rows of a large vocabulary are shared out among threads: a vector of one thread is empty in another."""
    path, options = save_tiny(tmp_path / "wide", 20_000), dict(threads=3)
    several, single = load(path, **options), load(path, True, **options)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        sampling = dict(temperature=1.0, named=False, stop_token_ids=frozenset(range(0, 20_000, 40)))
        check_alike(several, single, [engine_request(str(n), prompt(9, n), 40, seed=n, **sampling) for n in range(5)])
    finally:
        torch.set_num_threads(num_threads)
