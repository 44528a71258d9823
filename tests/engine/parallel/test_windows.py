"""Engines of ranks and of stages whose layers have windows in part: what goes back of their one pool is given back for
all, and the answers are those of one process that has room for all of it."""

import pytest

from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from tests.support.engine.collector import run_to_end
from tests.support.engine.forced import ForcedProposer
from tests.support.engine.handover import check_handed_over, hand_over
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import SMALL, make_folder

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there"),
    pytest.mark.usefixtures("forked_ranks"),
]
SHAPES = {
    "one process": {},
    "two ranks": {"tensor_parallel": 2, "threads": 2},
    "two stages": {"pipeline_parallel": 2},
}
PROMPTS = {f"r{index}": [(at * 7 + index) % 190 + 3 for at in range(100)] for index in range(2)}
MAX_TOKENS = 200
SAMPLED = dict(temperature=0.5, seed=3, logprobs=1)
OPTIONS = dict(threads=1, block_size=16, max_num_seqs=2, max_num_batched_tokens=90, max_model_len=304)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_folder(folder, "gemma3", hidden_size=64)
    return folder


def asked():
    return [engine_request(name, ids, MAX_TOKENS, **SAMPLED) for name, ids in PROMPTS.items()]


@pytest.fixture(scope="module")
def whole(folder):
    """The records of an engine that never lacks a block."""
    return run_to_end(Engine.load(EngineConfig(folder, num_blocks=96, **OPTIONS)), asked())


@pytest.mark.parametrize("shape", SHAPES)
def test_speculated_beside_each_other_in_the_memory_of_one(folder, whole, shape):
    """Two sequences of 19 blocks each in 30 whole ones: none is preempted, none reads what is gone; then handed
    over."""
    answers = {(key.request_id, 0): record.tokens[0] for key, record in whole.items()}
    config = EngineConfig(
        folder, num_blocks=30, speculator="auto", **OPTIONS | SHAPES[shape] | dict(num_draft_tokens=3)
    )
    engine = Engine.load(config, proposers=[ForcedProposer(answers, 0.67, SMALL["vocab_size"])])
    try:
        assert engine.num_blocks == 30 and engine.ledger.num_ids == engine.pool.num_blocks == 60
        records = run_to_end(engine, asked())
        for key, record in whole.items():
            assert records[key].answer() == record.answer() and records[key].logprobs == record.logprobs
            assert records[key].ended.report.num_preemptions == 0
        assert engine.ledger.num_available == 30
        prefill = Engine.load(EngineConfig(folder, num_blocks=30, **OPTIONS))
        requests = [engine_request(each.key.request_id, each.token_ids, MAX_TOKENS, 1, **SAMPLED) for each in asked()]
        firsts, rest = hand_over(prefill, engine, requests)
        for request in requests:
            check_handed_over(firsts, rest, request, whole[request.key._replace(attempt=0)])
    finally:
        if engine.ranks is not None:
            engine.ranks.close()
