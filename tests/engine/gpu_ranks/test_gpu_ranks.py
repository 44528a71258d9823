"""Engines whose ranks have a device and a pool each, on a CPU with gloo: graphs, steps in flight and the sums between
processes are real, the devices are not."""

import os
import signal
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels, native
from baton.engine.core.config import EngineConfig, resolve
from baton.engine.core.device import UTILIZATION
from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.engine.execute import launcher
from baton.engine.execute.launcher import GpuLauncher
from baton.engine.gpu_ranks import build
from baton.engine.gpu_ranks.build import load_on_gpus
from baton.engine.gpu_ranks.launcher import LeadingLauncher
from baton.engine.models import loader
from baton.engine.models.loader import load_model, model_identity
from baton.engine.models.registry import read_spec
from baton.engine.parallel.collectives import num_bytes_for
from baton.engine.parallel.distributed import DistributedCollectives
from baton.engine.parallel.shard import Shard
from baton.engine.ranks.spawn import Ranks
from baton.engine.sampling.on_device import sampler_on
from baton.training.heads.heads import export_heads, new_heads
from baton.training.heads.target import FrozenTarget
from tests.support.engine.collector import run_to_end
from tests.support.engine.cpu_as_gpu import MEMORY, stand_in
from tests.support.engine.graphs import replay_by_computing
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.adapters import ATTENTION, TARGETS
from tests.support.model_folders.families import make_adapter, make_few_heads, make_folder, random_ids
from tests.support.native.ranks_in_threads import lose_last_rank

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the real devices are tested by test_on_gpus.py"),
    pytest.mark.skipif(not kernels.INTERPRETED, reason="Triton's interpreter is off in this process"),
    pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there"),
    pytest.mark.usefixtures("forked_ranks"),
]
CPU = torch.device("cpu")


@pytest.fixture
def devices(monkeypatch):
    stand_in(monkeypatch.setattr)
    monkeypatch.setattr(build, "PROGRAM", "tests.support.engine.cpu_as_gpu")
    monkeypatch.setattr(build, "devices_for", lambda config: [CPU] * config.num_ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_folder(path, "llama3", head_dim=16, num_hidden_layers=1)
    return path


def config_of(folder, degree: int, **options) -> EngineConfig:
    return EngineConfig(
        folder, device="cpu", attention="triton", block_size=16, num_blocks=8, max_num_seqs=2, max_model_len=64,
        max_num_batched_tokens=66, threads=1, tensor_parallel=degree, **options,
    )  # fmt: skip


def load(config: EngineConfig) -> Engine:
    parts = load_on_gpus(config)
    engine = Engine(parts.config, parts.model, parts.pool, model_identity(config.model), *parts[3:])
    for name, path in config.adapter_folders.items():
        engine.add_adapter(name, path)
    return engine


def answers(engine: Engine) -> dict:
    sampled = dict(temperature=0.9, seed=3, top_p=0.9)
    requests = [
        engine_request("greedy", random_ids(5, 1), 4), engine_request("sampled", random_ids(14, 2), 4, **sampled),
        engine_request("two", random_ids(18, 3), 2, temperature=1.0, seed=5, n=2, logprobs=2),
        engine_request("read", random_ids(5, 4), 1, prompt_logprobs=2),
    ]  # fmt: skip
    records: dict = {}
    for together in (requests[:2], requests[2:3], requests[3:]):
        records |= run_to_end(engine, together)
    return {key: (record.answer(), record.logprobs) for key, record in records.items()}


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_with_a_device_each_give_the_answers_of_one(folder, devices, degree):
    """In the bits of KV as well, of which each has its heads: in graphs and without, steps in flight, blocks that are
    copied, logits that are asked for later."""
    alone = Engine.load(config_of(folder, 1))
    alone.runner.launcher = GpuLauncher(alone.runner.model, alone.pool, alone.config, False)
    alone.runner.sampler = sampler_on(CPU)
    expected = answers(alone)
    engine = load(config_of(folder, degree))
    try:
        made = engine.runner.launcher
        assert made.overlaps and made.num_graphs == 2
        launched, launch = [], made.launch
        made.launch = lambda batch, *given: launched.append(batch.token_ids) or launch(batch, *given)
        assert answers(engine) == expected
        assert any(bool((ids < 0).all()) for ids in launched)
        assert engine.numerics_class == alone.numerics_class
        own = Shard(0, degree).kv_heads(engine.spec.num_kv_heads)
        assert torch.equal(engine.pool.blocks, alone.pool.blocks[:, :, :, own.start : own.stop])
        weights = engine.runner.model.weights.num_bytes
        assert engine.ranks.num_bytes == [weights] * (degree - 1)
        assert engine.ranks.sums.row_us > 0
    finally:
        engine.ranks.close()
    assert all(process.ended() for process in engine.ranks._processes)


@pytest.mark.parametrize(
    ("num_stages", "attention"), [(2, "triton"), pytest.param(3, "reference", marks=pytest.mark.long)]
)
def test_stages_with_a_device_each_give_the_answers_of_one(tmp_path, devices, num_stages, attention):
    """In the bits of KV as well, of which each has its layers: in graphs and with steps in flight, and in torch's
    operators."""
    make_few_heads(tmp_path, num_stages)
    config = replace(config_of(tmp_path, 1), attention=attention)
    alone = Engine.load(config)
    alone.runner.launcher = GpuLauncher(alone.runner.model, alone.pool, alone.config, False)
    alone.runner.sampler = sampler_on(CPU)
    expected = answers(alone)
    engine = load(replace(config, pipeline_parallel=num_stages))
    try:
        assert engine.runner.launcher.overlaps == (attention == "triton")
        assert engine.runner.launcher.num_graphs == 2 * (attention == "triton")
        assert answers(engine) == expected
        assert engine.numerics_class == alone.numerics_class
        own = engine.runner.model.own_layers
        assert torch.equal(engine.pool.blocks, alone.pool.blocks[:, own.start : own.stop])
        assert len(engine.ranks.num_bytes) == num_stages - 1 and engine.ranks.sums is None
    finally:
        engine.ranks.close()
    assert all(process.ended() for process in engine.ranks._processes)


def test_ranks_size_their_pools(folder, devices):
    """As a start does by default: they compute the step that is measured together, the logits of a prompt that is read
    too."""
    engine = load(replace(config_of(folder, 2), num_blocks=None))
    try:
        layout = engine.pool.layout
        assert layout.num_blocks(64) < engine.pool.num_blocks < MEMORY * UTILIZATION // layout.block_bytes
        request = engine_request("a", random_ids(9, 1), 3)
        assert len(run_to_end(engine, [request])[request.key].tokens[0]) == 3
    finally:
        engine.ranks.close()


def test_adapters_give_the_answers_of_one(tmp_path, devices):
    """By the kernels of a GPU: of inputs that ranks share each needs all, and an adapter has them of all."""
    model = make_folder(tmp_path / "base", "llama3", head_dim=16, num_hidden_layers=1)
    make_adapter(tmp_path / "all", model, TARGETS["llama3"])
    make_adapter(tmp_path / "some", model, ATTENTION, rank=4, seed=1)
    named = tuple(f"{name}={tmp_path / name}" for name in ("all", "some"))
    config = replace(config_of(tmp_path / "base", 1), linear="triton", adapter=named)
    alone, engine = Engine.load(config), load(replace(config, tensor_parallel=2))
    try:
        assert alone.runner.model.weights.kernels == engine.runner.model.weights.kernels == ("triton",)
        listed = engine.adapters.listed()
        requests = [
            engine_request(name, random_ids(9, seed), 3, adapter=listed[name], logprobs=2)
            for seed, name in enumerate(("all", "some"))
        ]
        found, wanted = (run_to_end(each, requests) for each in (engine, alone))
        for request in requests:
            ours, theirs = found[request.key], wanted[request.key]
            assert ours.answer() == theirs.answer() and ours.logprobs == theirs.logprobs
    finally:
        engine.ranks.close()


def test_an_adapter_of_another_base_is_one_line(folder, devices, tmp_path, capfd):
    """Every rank meets it where it sizes its pool; the first one says it."""
    make_adapter(tmp_path / "a", make_folder(tmp_path / "base", "llama3", hidden_size=64, head_dim=16), ATTENTION)
    with pytest.raises(ModelError, match=r"adapter_model.safetensors: .* this base and rank 8 ask for"):
        load(replace(config_of(folder, 2), num_blocks=None, adapter=(f"a={tmp_path / 'a'}",)))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["medusa", pytest.param("eagle", marks=pytest.mark.long)])
def test_heads_give_the_answers_of_one(folder, devices, kind, tmp_path):
    """They are made before ranks compute anything together, and look into the embedding then: of a GPU's ranks each has
    all of it."""
    target = FrozenTarget(folder, 64, 64)
    export_heads(new_heads(target, kind), kind, target, tmp_path)
    config = replace(config_of(folder, 1), linear="triton", cuda_graphs=False)
    request = engine_request("a", random_ids(9, 1), 6)
    expected = run_to_end(Engine.load(config), [request])[request.key].answer()
    engine = load(replace(config, tensor_parallel=2, speculator=kind, draft_model=tmp_path, num_draft_tokens=2))
    try:
        asked, proposer = [], engine.speculator.proposers[kind]
        propose = proposer.propose
        proposer.propose = lambda asks: asked.append(len(asks)) or propose(asks)
        assert run_to_end(engine, [request])[request.key].answer() == expected
        assert asked
    finally:
        engine.ranks.close()


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.long)])
def test_experts_of_ranks_are_grouped(tmp_path, devices, degree):
    """In graphs and steps in flight, with the bits of one: what each expert says is added over the ranks in one
    turn."""
    make_folder(tmp_path, "mixtral", head_dim=16, num_hidden_layers=1)
    config = replace(config_of(tmp_path, 1), linear="triton", dtype="bf16", kv_dtype="bf16")
    alone = Engine.load(config)
    engine = load(replace(config, tensor_parallel=degree))
    try:
        model, made = engine.runner.model, engine.runner.launcher
        assert made.overlaps and made.num_graphs == 2 and "grouped experts" not in model.reasons["layers"]
        request = engine_request("a", random_ids(9, 1), 4, logprobs=2)
        found, wanted = (run_to_end(each, [request])[request.key] for each in (engine, alone))
        assert found.answer() == wanted.answer() and found.logprobs == wanted.logprobs
        own = Shard(0, degree).kv_heads(engine.spec.num_kv_heads)
        assert torch.equal(engine.pool.blocks, alone.pool.blocks[:, :, :, own.start : own.stop])
    finally:
        engine.ranks.close()


def test_fast_sums_of_experts_are_one_a_layer(tmp_path, devices):
    """Weighed by each rank before: of rows, not of what each expert says of them."""
    make_folder(tmp_path, "mixtral", head_dim=16, num_hidden_layers=1)
    config = replace(config_of(tmp_path, 1, batch_invariant=False), linear="triton", cuda_graphs=False)
    alone, engine = Engine.load(config), load(replace(config, tensor_parallel=2, all_reduce="fast"))
    try:
        sums, add = [], engine.runner.model.collectives.sum
        engine.runner.model.collectives.sum = lambda part, *given: sums.append(len(part)) or add(part, *given)
        request = engine_request("a", random_ids(9, 1), 1, logprobs=1)
        found, wanted = (run_to_end(each, [request])[request.key] for each in (engine, alone))
        assert sums == [9] * 3
        assert found.answer() == wanted.answer()
        assert found.logprobs[0][0].chosen[1] == pytest.approx(wanted.logprobs[0][0].chosen[1], abs=1e-4)
    finally:
        engine.ranks.close()


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("mixtral", {"quantization": "int8"}, "rows are rounded by the largest input of all ranks"),
        ("gpt-oss", {}, "a bias is added to the sum of all ranks"),
        ("qwen3-moe", {"expert_parallel": True}, "a rank has some of the experts, whole (--expert-parallel)"),
    ],
)
def test_why_experts_of_ranks_are_not_grouped(tmp_path, devices, name, options, why):
    make_folder(tmp_path, name, hidden_size=64, intermediate_size=128)
    config = resolve(config_of(tmp_path, 2, linear="triton", **options), read_spec(tmp_path))
    shard = Shard(0, 2, config.expert_parallel)
    model = load_model(config, CPU, DistributedCollectives(memoryview(bytearray(num_bytes_for(2))), shard, None, CPU))
    assert model.reasons["layers"]["grouped experts"] == why and not model.capturable


def test_routers_of_ranks_are_exact(tmp_path, monkeypatch):
    """Each rank measures which kernels are fastest on its own GPU. Scores of two kernels differ in their last bits, and
    experts that ranks choose otherwise end their sums out of step."""
    make_folder(tmp_path, "mixtral", head_dim=16, num_hidden_layers=1)
    asked, choose = [], loader.choose_linear

    def choose_linear(name, exact, *given):
        asked.append((name, exact))
        return choose(name, exact, *given)

    monkeypatch.setattr(loader, "choose_linear", choose_linear)
    config = resolve(config_of(tmp_path, 2, batch_invariant=False, linear="native"), read_spec(tmp_path))
    ends = DistributedCollectives(memoryview(bytearray(num_bytes_for(2))), Shard(0, 2), None, CPU)
    load_model(config, CPU, ends)
    assert asked == [("native", False), ("auto", True)]


def test_captured_steps_have_their_sums(folder, devices, monkeypatch):
    """Each layer's two and the embedding's: an all-to-all and an all-gather each, and the head's all-gather."""
    calls, captured, call_all = [], [], DistributedCollectives._all
    monkeypatch.setattr(DistributedCollectives, "_all", lambda self, call: calls.append(call) or call_all(self, call))

    def capture(run):
        before = len(calls)
        made = replay_by_computing(run)
        captured.append(len(calls) - before)
        return made

    monkeypatch.setattr(launcher, "CudaCapture", lambda stream: capture)
    engine = load(config_of(folder, 2))
    engine.ranks.close()
    assert captured == [2 * (2 * engine.spec.num_layers + 1) + 1] * 2


def test_what_one_rank_cannot_capture_none_does(folder, devices, monkeypatch):
    """Else it would sum three rows where the others sum those of the graph of four."""
    config = replace(config_of(folder, 1), max_num_seqs=4, num_blocks=16, max_num_batched_tokens=68)
    alone, tried = Engine.load(config), []

    def capture(run):
        made = replay_by_computing(run)
        tried.append(len(tried))
        if len(tried) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return made

    monkeypatch.setattr(launcher, "CudaCapture", lambda stream: capture)
    engine = load(replace(config, tensor_parallel=2))
    try:
        assert engine.runner.launcher.num_graphs == 0 and len(tried) == 2
        requests = [engine_request(str(seed), random_ids(5, seed), 3) for seed in range(3)]
        found, wanted = (run_to_end(each, requests) for each in (engine, alone))
        assert [found[each.key].answer() for each in requests] == [wanted[each.key].answer() for each in requests]
    finally:
        engine.ranks.close()


def test_fast_sums_are_a_class_of_their_own(folder, devices):
    engine = load(config_of(folder, 2, all_reduce="fast", batch_invariant=False))
    try:
        request = engine_request("a", random_ids(9, 1), 3)
        record = run_to_end(engine, [request])[request.key]
        assert len(record.tokens[0]) == 3
        assert "ranks2" in str(engine.numerics_class)
    finally:
        engine.ranks.close()


@pytest.mark.parametrize(
    ("how", "said"), [(signal.SIGKILL, "was killed by signal 9"), (signal.SIGSTOP, "stands still for 1.5 s")]
)
def test_a_lost_rank_ends_every_wait(folder, devices, how, said):
    engine = load(config_of(folder, 2))
    long = engine_request("a", random_ids(9, 1), 6)
    lose_last_rank(engine, how, said, long, lambda name: engine_request(name, [5, 6], 5))


def test_a_rank_that_is_lost_while_it_warms_up(folder, devices, monkeypatch):
    """As one that has no room for its pool: a line says which."""
    warm_up = LeadingLauncher.warm_up

    def warm_up_without(made, config):
        os.kill(made.killed, signal.SIGKILL)
        warm_up(made, config)
        made.model.measure_sums(1)

    wait = Ranks.wait
    monkeypatch.setattr(
        Ranks, "wait", lambda ranks, own: wait(ranks, own) or setattr(LeadingLauncher, "killed", ranks.pids[0])
    )
    monkeypatch.setattr(LeadingLauncher, "killed", 0, raising=False)
    monkeypatch.setattr(LeadingLauncher, "warm_up", warm_up_without)
    with pytest.raises(ValueError, match=r"^rank 1 \(pid \d+\) was killed by signal 9$"):
        load(config_of(folder, 2))


def test_a_rank_that_ends_before_it_has_met_the_others(folder, devices, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ValueError, match="^rank 1 ended at its start with status 1: see its lines on stderr$"):
        load(config_of(folder, 2))


def test_without_the_native_kernels_it_is_one_line(folder, devices, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "unavailable", lambda: "no compiler is here")
    with pytest.raises(ValueError, match=r"tensor_parallel 2: ranks need the native kernels: no compiler is here"):
        load_on_gpus(config_of(folder, 2))
