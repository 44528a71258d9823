"""Models whose layers keep a state, folded by Triton's kernels: compiled on a GPU, in the interpreter on a CPU. Logits
against the CPU's kernels, bits whatever shares a step; engines with graphs, padding, steps in flight, checkpoints and
proposals."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels
from baton.engine.core.config import EngineConfig, resolve
from baton.engine.core.device import Memory
from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.engine.execute import build, launcher
from baton.engine.execute.launcher import GpuLauncher
from baton.engine.gpu_ranks.build import unfit
from baton.engine.models import loader, read_layer
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from tests.support.engine.collector import run_to_end
from tests.support.engine.graphs import replay_by_computing
from tests.support.engine.manual_batch import ManualBatch
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import make_folder, random_ids

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the real device is tested by test_gpu_engine.py"),
    pytest.mark.skipif(kernels.INTERPRETED is False, reason="Triton's interpreter is off in this process"),
]
SMALL = dict(num_heads=2, head_dim=64, state_size=16, n_groups=1, num_hidden_layers=1)  # of Mamba-2
FAMILIES = ["qwen3-next"]
MORE = ["jamba", "mamba2", "granite-4", "falcon-h1-norm", "bamba", "nemotron-h", "qwen3.5"]


@pytest.fixture
def folded_by_triton(monkeypatch):
    monkeypatch.setattr(read_layer, "on_gpu", lambda device: True)


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_logits_are_the_cpus_and_bits_are_anyones(tmp_path, name, monkeypatch):
    make_folder(tmp_path, name)
    config, ids, others = EngineConfig(tmp_path, threads=1), random_ids(9, 1), random_ids(3, 2)
    cpu = ManualBatch(load_model(config))
    monkeypatch.setattr(read_layer, "on_gpu", lambda device: True)
    model = load_model(config)
    assert any("triton" in word for word in model.numerics)
    alone, mixed = ManualBatch(model), ManualBatch(model)
    whole = alone.step({"a": ids})["a"]
    torch.testing.assert_close(whole, cpu.step({"a": ids})["a"], atol=1e-4, rtol=1e-4)
    parts = [mixed.step({"a": ids[:5]}), mixed.step({"b": others, "a": ids[5:8]}), mixed.step({"a": ids[8:]})]
    assert torch.equal(torch.cat([part["a"] for part in parts]), whole)


@pytest.fixture
def device(monkeypatch, folded_by_triton):
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(launcher, "CudaCapture", lambda stream: replay_by_computing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=lambda: None))


def small_engine(folder, **options) -> Engine:
    config = dict(block_size=16, num_blocks=24, num_states=8, max_num_seqs=4, max_model_len=128, checkpoint_tokens=64)
    return Engine.load(EngineConfig(folder, device="cpu", attention="triton", **(config | options)))


def test_an_engine_in_graphs_with_steps_in_flight(tmp_path, device):
    """Three sequences in a graph of four; a state that is kept while the next step is in flight is found by the next
    request."""
    make_folder(tmp_path, "mamba2", **SMALL)
    plain, over = small_engine(tmp_path), small_engine(tmp_path)
    made = over.runner.launcher = GpuLauncher(over.runner.model, over.pool, over.config, False)
    assert made.overlaps and made.num_graphs == 3
    shapes, run_graph = [], made._graphs.run
    made._graphs.run = lambda batch, shape, *before: (
        shapes.append((len(batch.seqs), shape.num_seqs)) or run_graph(batch, shape, *before)
    )
    first = [engine_request(name, random_ids(size, size), 6) for name, size in (("a", 61), ("b", 2), ("c", 3))]
    wanted, found = run_to_end(plain, first), run_to_end(over, first)
    assert {key: record.answer() for key, record in found.items()} == {key: r.answer() for key, r in wanted.items()}
    assert (3, 4) in shapes
    answer = found[first[0].key].tokens[0]
    following = engine_request("d", random_ids(61, 61) + list(answer)[:5], 2)
    wanted, found = (run_to_end(engine, [following])[following.key] for engine in (plain, over))
    assert found.answer() == wanted.answer() and found.first.num_cached_tokens == 64


def test_proposals_are_folded_when_they_are_right(tmp_path, device):
    make_folder(tmp_path, "mamba2", **SMALL)
    options = dict(speculator="ngram", num_draft_tokens=2, max_num_seqs=2)
    few = tuple((token_id, 25.0) for token_id in range(3, 6))
    request = engine_request("a", [3, 4, 5, 3, 4, 5, 3, 4], 8, logit_bias=few)
    plain, drafting = small_engine(tmp_path, max_num_seqs=2), small_engine(tmp_path, **options)
    drafting.runner.launcher = GpuLauncher(drafting.runner.model, drafting.pool, drafting.config, True)
    wanted, found = (run_to_end(engine, [request])[request.key] for engine in (plain, drafting))
    assert found.answer() == wanted.answer()
    assert sum(sum(counts.accepted) for counts in drafting.speculator.counts.values()) > 0


def test_memory_for_states_is_counted(tmp_path, monkeypatch, folded_by_triton):
    make_folder(tmp_path, "mamba2", **SMALL)
    config = resolve(EngineConfig(tmp_path, max_num_seqs=3), read_spec(tmp_path))
    model = load_model(config)
    state_bytes = model.kv_layout("fp32", 16).state_bytes
    memory = Memory(total=100 * state_bytes, free=100 * state_bytes, ours=90 * state_bytes)
    monkeypatch.setattr(Memory, "of", lambda device: memory)
    monkeypatch.setattr(build, "step_bytes", lambda model, config, speculates: 5 * state_bytes)
    config = replace(config, gpu_memory_utilization=0.99, num_states=None)
    assert build.gpu_sizes(config, model, False) == (None, 4)  # of six that it would have
    with pytest.raises(
        ValueError, match=r"^out of GPU memory for states: 5 of .* GiB, and .* are left; lower num_states"
    ):
        build.gpu_sizes(replace(config, num_states=5), model, False)


def test_what_is_refused_is_one_line(tmp_path, monkeypatch):
    make_folder(tmp_path, "mamba2", **SMALL)
    why = unfit(EngineConfig(tmp_path, tensor_parallel=2), read_spec(tmp_path))
    assert why == "layers with a state are computed by one GPU: leave it at 1, or give device cpu"
    monkeypatch.setattr(loader.kernels, "unavailable", lambda device: "triton is not installed")
    with pytest.raises(ModelError, match="layers with a state on a GPU: triton is not installed$"):
        load_model(EngineConfig(tmp_path), torch.device("cuda", 0))
