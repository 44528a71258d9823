"""Adapters by Triton's kernels, compiled on a GPU and in the interpreter on a CPU: whole engines against torch's
composition of the same pairs, and mixed in one batch, bit for bit as alone."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels
from baton.engine.adapters.adapters import Adapter
from baton.engine.core.batch import AdapterRows
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import make_adapter, make_folder, random_ids

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = pytest.mark.skipif(
    bool(kernels.unavailable(DEVICE.type)), reason=kernels.unavailable(DEVICE.type) or "there"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_several_adapters(dtype):
    """Ranks that no tile divides, one above 64; an adapter without this linear; rows of none; more rows than a tile
    has."""
    from baton.engine.adapters.gpu_low_rank import BLOCK_M, GpuAdapters, GpuLowRank

    torch.manual_seed(1)
    num_in, sizes = 72, (40, 16)

    def pair(*ranks: int) -> GpuLowRank:
        down = (torch.randn(sum(ranks), num_in) / 8).to(dtype).to(DEVICE)
        ups = [(torch.randn(out, rank) / 8).to(dtype).to(DEVICE) for out, rank in zip(sizes, ranks, strict=True)]
        return GpuLowRank(down, ups)

    layers = [{"down": pair(5, 0)}, {"down": pair(70, 20)}, {"qkv": pair(3, 3)}]
    adapters = [Adapter(str(index), None, ({}, own)) for index, own in enumerate(layers)]
    bounds = [(2, 5), (5, 8 + BLOCK_M), (8 + BLOCK_M, 10 + BLOCK_M)]
    rows = [AdapterRows(*own, adapter) for own, adapter in zip(bounds, adapters, strict=True)]
    x = torch.randn(12 + BLOCK_M, num_in).to(dtype).to(DEVICE)
    y = torch.randn(len(x), sum(sizes)).to(dtype).to(DEVICE)
    before, own = y.clone(), GpuAdapters(DEVICE)
    own.plan(rows).add(1, "down", x, y)
    wanted = before.double()
    for (begin, end), layer in zip(bounds[:2], layers, strict=False):
        inner = (x[begin:end].double() @ layer["down"].down.double().t()).to(dtype)
        wanted[begin:end] += (inner.double() @ layer["down"].up.double().t()).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)
    for index in (0, 1, *range(8 + BLOCK_M, len(x))):
        assert torch.equal(y[index], before[index])
    alone = before.clone()
    own.plan([AdapterRows(7, 8, adapters[1])]).add(1, "down", x, alone)
    assert torch.equal(alone[7], y[7])


def test_an_adapter_of_which_a_stage_has_nothing():
    from baton.engine.adapters.gpu_low_rank import GpuAdapters

    adapter, own = Adapter("a", None, ({}, {})), GpuAdapters(DEVICE)
    own.warm_up(adapter, torch.float32)
    assert own.plan([AdapterRows(0, 3, adapter)]) is None


def test_engines_that_mix_adapters(tmp_path, on_gpu_kernels):
    model = make_folder(tmp_path / "base", "llama3", head_dim=16)
    merged = make_adapter(tmp_path / "a", model, ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
    make_adapter(tmp_path / "b", model, ["up_proj", "k_proj"], rank=3, seed=1)
    config = EngineConfig(
        tmp_path / "base", adapter=(f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"), device=DEVICE.type,
        attention="triton", block_size=16, num_blocks=24, max_num_seqs=4, max_model_len=64, dtype="fp32",
        cuda_graphs=False,
    )  # fmt: skip
    engine = Engine.load(config)
    assert engine.runner.model.layers_name == "torch" and not engine.runner.model.capturable
    named = engine.adapters.listed()
    prompt = random_ids(9, 1)
    asked = {
        name: engine_request(name, prompt, 2, prompt_logprobs=0, logprobs=0, adapter=named.get(name, b""))
        for name in ("a", "none", "b")
    }
    together = run_to_end(engine, list(asked.values()))
    for name, request in asked.items():
        alone = engine_request(f"{name} alone", prompt, 2, prompt_logprobs=0, logprobs=0, adapter=request.adapter)
        assert run_to_end(engine, [alone])[alone.key].logprobs == together[request.key].logprobs
    record = together[asked["a"].key]
    entries = [*record.first.prompt_logprobs, *record.logprobs[0]]
    with torch.no_grad():
        answer = merged.generate(torch.tensor([prompt]), max_new_tokens=2, min_new_tokens=2, do_sample=False)
        logprobs = merged(answer).logits[0, :-1].log_softmax(1).gather(1, answer[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([entry.chosen[1] for entry in entries]), logprobs, rtol=0, atol=1e-4)
