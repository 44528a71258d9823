"""Every shape of a prefill worker with every one of a decode worker: answers handed over, speculated and migrated are
those of one process, logprobs bit for bit."""

from dataclasses import replace

import pytest

from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.handover import check_handed_over, hand_over
from tests.support.engine.toy_engine import engine_request
from tests.support.models import TINY, make_model

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there"),
    pytest.mark.long,  # 16 processes beside this one
]
SHAPES = {
    "one process": {},
    "two ranks": {"tensor_parallel": 2},
    "four ranks": {"tensor_parallel": 4},
    "two stages": {"pipeline_parallel": 2},
    "two stages of two ranks": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
MAX_TOKENS, MOVED_AT = 20, 7
PROMPT = [*range(5, 165)]


def request(name: str, attempt: int = 0, token_ids=PROMPT, **options):
    sampling = {"temperature": 0.3, "seed": 11, "logprobs": 2}
    return engine_request(name, token_ids, MAX_TOKENS, attempt, num_prompt_tokens=len(PROMPT), **sampling, **options)


@pytest.fixture(scope="module")
def roles(forked_ranks, tmp_path_factory):
    """An engine of each shape, of either role; those that decode speculate."""
    folder = make_model(tmp_path_factory.mktemp("model"), replace(TINY, num_layers=3))

    def load(**options) -> Engine:
        return Engine.load(EngineConfig(folder, threads=1, num_blocks=64, **options))

    prefill = {name: load(**options) for name, options in SHAPES.items()}
    speculates = {"speculator": "draft", "draft_model": folder, "num_draft_tokens": 3}  # the model guesses itself
    decode = {name: load(**options, **speculates) for name, options in SHAPES.items()}
    yield prefill, decode
    for engine in (*prefill.values(), *decode.values()):
        if engine.ranks is not None:
            engine.ranks.close()


@pytest.fixture(scope="module")
def whole(roles):
    asked = request("whole", named=False)
    return run_to_end(roles[0]["one process"], [asked])[asked.key]


@pytest.mark.parametrize("source", SHAPES)
@pytest.mark.parametrize("taker", SHAPES)
def test_decode_after_handoff_equals_whole(roles, whole, source, taker):
    prefill, decode = roles
    asked = request(f"{source}, {taker}", named=False)
    assert prefill[source].numerics_class == decode[taker].numerics_class
    firsts, rest = hand_over(prefill[source], decode[taker], [asked])
    check_handed_over(firsts, rest, asked, whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_worker_of_any_shape_answers_alike(roles, whole, shape):
    """Speculated."""
    engine, asked = roles[1][shape], request(f"whole of {shape}", named=False)
    found = run_to_end(engine, [asked])[asked.key]
    assert found.answer() == whole.answer() and found.logprobs == whole.logprobs
    assert sum(engine.speculator.counts["draft"].accepted) > 0


@pytest.mark.parametrize("other", SHAPES)
def test_an_answer_continues_on_a_worker_of_another_shape(roles, whole, other):
    """From a worker of any shape, whose tokens all are those of `whole`, on to this one."""
    tokens = whole.tokens[0]
    moved = request(f"moved to {other}", 1, [*PROMPT, *tokens[:MOVED_AT]], named=False)
    engine = roles[1][other]
    engine.submit(moved)
    found = run_to_end(engine, collector=Collector(first_index=MOVED_AT))[moved.key]
    assert found.tokens[0] == tokens[MOVED_AT:] and found.logprobs[0] == whole.logprobs[0][MOVED_AT:]
