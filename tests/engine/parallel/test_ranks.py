"""The ranks of an engine as processes: the same tokens and KV as one process, and one line where they cannot be had."""

import signal
import subprocess
import threading
import time
from dataclasses import replace

import pytest
import torch

from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.engine.parallel.stage import cut_layers
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import make_folder
from tests.support.models import TINY, make_model
from tests.support.native.ranks_in_threads import collectives_of, depths_of, lose_last_rank

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there"),
    pytest.mark.usefixtures("forked_ranks"),
]
NUM_TOKENS = 24
PROMPTS = [list(range(5, 5 + length)) for length in (3, 70, 130)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("deep"), replace(TINY, num_layers=4))


def config_of(folder, degree: int, **options) -> EngineConfig:
    return EngineConfig(folder, threads=1, num_blocks=64, tensor_parallel=degree, **options)


def stages_of(folder, num_stages: int, **options) -> EngineConfig:
    return EngineConfig(folder, threads=1, num_blocks=64, pipeline_parallel=num_stages, **options)


def grid_of(folder, degree: int, **options) -> EngineConfig:
    """As many stages as each has ranks."""
    return config_of(folder, degree, pipeline_parallel=degree, **options)


def requests() -> list:
    sampled = engine_request("sampled", PROMPTS[1], NUM_TOKENS, temperature=1.0, top_p=0.9, seed=3, n=2, logprobs=2)
    return [*(engine_request(str(len(ids)), ids, NUM_TOKENS) for ids in PROMPTS), sampled]


def many() -> list:
    """Requests of all kinds, enough for a step in each of three stages."""
    kinds = (
        {},
        {"temperature": 1.0, "seed": 3},
        {"logprobs": 2},
        {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.5, "n": 2},
        {"prompt_logprobs": 1},
    )
    prompts = [[(7 * index + at) % 90 + 5 for at in range(3 + index)] for index in range(24)]
    return [
        engine_request(f"many{index}", ids, NUM_TOKENS // 2, **kinds[index % len(kinds)])
        for index, ids in enumerate(prompts)
    ]


def answers(engine: Engine, make=requests) -> dict:
    records = run_to_end(engine, make())
    return {key: (record.answer(), record.logprobs, record.first.prompt_logprobs) for key, record in records.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculator": "ngram"},
        {"speculator": "draft", "num_draft_tokens": 3},
        {"dtype": "bf16", "kv_dtype": "int8"},
    ],
    ids=str,
)
def test_ranks_give_the_answers_of_one(folder, options):
    """A draft model is the first rank's alone: here one that guesses right, the model itself."""
    if options.get("speculator") == "draft":
        options = options | {"draft_model": folder}
    alone = Engine.load(config_of(folder, 1, **options))
    expected = answers(alone)
    engine = Engine.load(config_of(folder, 2, **options))
    try:
        assert answers(engine) == expected
        if options.get("speculator") == "draft":
            assert sum(engine.speculator.counts["draft"].accepted) > 0
        assert torch.equal(engine.pool.bytes, alone.pool.bytes)
        assert engine.numerics_class == alone.numerics_class
        weights = engine.ranks.num_bytes[0], engine.runner.model.weights.num_bytes
        assert weights[0] == weights[1] < alone.runner.model.weights.num_bytes * 0.6
    finally:
        engine.ranks.close()
    assert all(process.ended() for process in engine.ranks._processes)


@pytest.mark.parametrize("options", [{}, {"speculator": "draft", "num_draft_tokens": 3}], ids=str)
def test_stages_give_the_answers_of_one_process(deep, options):
    """Of 4 layers; a draft model is on the first stage alone. Each stage reads its own layers' tensors, once. Then of
    so many requests that there are steps in all stages at a time."""
    options = options | ({"draft_model": deep} if options else {})
    alone = Engine.load(config_of(deep, 1, **options))
    expected, kept = answers(alone), alone.pool.bytes.clone()
    of_many = answers(alone, many)
    for num_stages in (2, 3):
        engine = Engine.load(stages_of(deep, num_stages, **options))
        try:
            assert answers(engine) == expected, f"{num_stages} stages"
            assert torch.equal(engine.pool.bytes, kept)
            assert engine.numerics_class == alone.numerics_class
            read = [report.read_bytes for report in engine.ranks.reports]
            assert sum(read) == alone.runner.model.weights.read_bytes
            layers = [len(stage.layers) for stage in cut_layers(engine.spec, num_stages)]
            of_a_layer = {num_bytes / count for num_bytes, count in zip(read[1:], layers[1:], strict=True)}
            assert len(of_a_layer) == 1 and read[0] > layers[0] * of_a_layer.pop()
            depths = depths_of(engine)
            assert answers(engine, many) == of_many
            assert max(depths) == (0 if options else num_stages - 1)
        finally:
            engine.ranks.close()


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"speculator": "draft", "num_draft_tokens": 3}, marks=pytest.mark.long)], ids=str
)
def test_stages_of_several_ranks_give_the_answers_of_one_process(deep, options):
    """Every rank of every stage has a quarter of the layers' weights, and the first stage's the ends as well."""
    options = options | ({"draft_model": deep} if options else {})
    alone = Engine.load(config_of(deep, 1, **options))
    expected, kept = answers(alone), alone.pool.bytes.clone()
    of_many = answers(alone, many)
    engine = Engine.load(grid_of(deep, 2, **options))
    try:
        assert answers(engine) == expected
        assert torch.equal(engine.pool.bytes, kept)
        assert answers(engine, many) == of_many
        assert engine.numerics_class == alone.numerics_class
        first, second, *others = [report.num_bytes for report in engine.ranks.reports]
        assert first == second and others[0] == others[1]
        assert first + second + sum(others) <= alone.runner.model.weights.num_bytes * 1.1
    finally:
        engine.ranks.close()


KILLED, STOPPED = (signal.SIGKILL, "was killed by signal 9"), (signal.SIGSTOP, "stands still for 1.5 s")


@pytest.mark.parametrize(
    ("how", "said", "config"),
    [
        (*KILLED, config_of),
        (*STOPPED, stages_of),
        (*KILLED, grid_of),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((*STOPPED, config_of), (*KILLED, stages_of))),
        pytest.param(*STOPPED, grid_of, marks=pytest.mark.long),
    ],
)
def test_a_lost_rank_ends_every_wait(folder, how, said, config):
    """Of stages too where each has a step."""
    engine = Engine.load(config(folder, 2))
    for index in range(18):
        engine.submit(engine_request(f"beside{index}", PROMPTS[0], NUM_TOKENS))
    depths, long = depths_of(engine), engine_request("a", PROMPTS[2], NUM_TOKENS)
    lose_last_rank(engine, how, said, long, lambda name: engine_request(name, PROMPTS[0], 5))
    assert max(depths) == (config is not config_of)


def test_ranks_that_have_some_experts_each(tmp_path):
    """And only those in memory."""
    sizes = dict(hidden_size=64, num_local_experts=4)
    make_folder(tmp_path, "mixtral", **sizes)
    alone, engine = (
        Engine.load(config_of(tmp_path, degree, expert_parallel=degree > 1, dtype="bf16")) for degree in (1, 2)
    )
    try:
        assert answers(engine) == answers(alone)
        own, whole = engine.runner.model.weights.num_bytes, alone.runner.model.weights.num_bytes
        assert engine.ranks.num_bytes == [own] and own < whole * 0.6
    finally:
        engine.ranks.close()


def test_the_rank_that_is_late_has_not_waited():
    """The other has, for as long."""
    first, second = collectives_of(2)
    part = torch.ones(1, 16)
    early = threading.Thread(target=lambda: first.sum(part, torch.float32))
    early.start()
    time.sleep(0.2)  # it has come and waits
    assert second.sum(part, torch.float32).eq(2).all()
    early.join()
    for end in (first, second):
        assert end.waited_s(0) > end.waited_s(1) > 0


@pytest.mark.parametrize("config", [config_of, stages_of])
def test_a_rank_that_ends_at_its_start(folder, config, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ValueError, match="^rank 1 ended at its start with status 1: see its lines on stderr$"):
        Engine.load(config(folder, 2))


@pytest.mark.parametrize("config", [config_of, stages_of])
def test_a_rank_that_is_never_ready(folder, config, monkeypatch, tmp_path):
    program = tmp_path / "silent"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("baton.engine.ranks.spawn.START_S", 0.2)
    with pytest.raises(ValueError, match="^rank 1 was not ready 0 s after its start$"):
        Engine.load(config(folder, 2))


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
    """The processes of the ranks that are started, here as users start them."""
    processes, popen = [], subprocess.Popen
    monkeypatch.setattr("baton.engine.ranks.process.subprocess", subprocess)

    def start(*args, **options):
        processes.append(popen(*args, **options))
        return processes[-1]

    monkeypatch.setattr("subprocess.Popen", start)
    return processes


@pytest.mark.parametrize("config", [config_of, stages_of])
def test_a_start_that_is_refused_late_leaves_no_rank(folder, tmp_path, config, started):
    """By a draft, and by an adapter: both are read once the ranks are there."""
    other = make_model(tmp_path / "draft", replace(TINY, vocab_size=TINY.vocab_size // 2))
    with pytest.raises(ValueError, match="draft"):
        Engine.load(config(folder, 2, speculator="draft", draft_model=other))
    with pytest.raises(ModelError, match="adapter"):
        Engine.load(config(folder, 2, adapter=(f"adapter={tmp_path}",)))
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_without_a_port_for_stages_of_other_hosts_no_rank_is_started(deep, started):
    with pytest.raises(ValueError, match="remote_stages: there is no port where ranks of other hosts could join"):
        Engine.load(stages_of(deep, 3, remote_stages=1))
    assert not started


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel 3: one of 1, 2, 4, 8"),
        ({"tensor_parallel": 8}, "tensor_parallel 8: 8 ranks do not divide 4 heads of attention"),
        (
            {"tensor_parallel": 2, "attention": "reference"},
            "tensor_parallel 2: needs native attention; what was chosen is reference",
        ),
        (
            {"tensor_parallel": 4, "quantization": "int4-g32"},
            "tensor_parallel 4: 64 inputs of a weight .int4-g32-asym.",
        ),
        ({"pipeline_parallel": 0}, "pipeline_parallel 0: must be at least 1"),
        ({"pipeline_parallel": 3}, "pipeline_parallel 3: the model has 2 layers"),
        (
            {"pipeline_parallel": 2, "tensor_parallel": 2, "remote_stages": 1},
            "remote_stages: a stage of another host has one rank; leave tensor_parallel at 1",
        ),
        ({"expert_parallel": True}, "expert_parallel has no effect without tensor_parallel; leave it out"),
        ({"all_reduce": "fast"}, "all_reduce has no effect without tensor_parallel; leave it out"),
        ({"all_reduce": "ring", "tensor_parallel": 2}, "all_reduce 'ring': one of exact, fast"),
        (
            {"tensor_parallel": 2, "expert_parallel": True},
            "tensor_parallel 2: .*expert_parallel has no effect on a model without experts; leave it out",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_cut_is_named(folder, options, message):
    with pytest.raises((ModelError, ValueError), match=message):
        Engine.load(EngineConfig(folder, threads=1, num_blocks=64, **options))
