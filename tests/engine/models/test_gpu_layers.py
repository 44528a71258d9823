"""Triton's kernels between the products against float64, and whole models run by them against torch: compiled on a GPU,
in Triton's interpreter on a CPU."""

import os

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels
from baton.engine.core.config import EngineConfig
from baton.engine.models.loader import load_model
from tests.support.engine.folders import Hand, make_folder, random_ids

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = pytest.mark.skipif(
    bool(kernels.unavailable(DEVICE.type)), reason=kernels.unavailable(DEVICE.type) or "there"
)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [48, 1000])
def test_rows(size, dtype):
    from baton.engine.kernels.rows import add_norm, swiglu

    torch.manual_seed(size)
    x, delta = (torch.randn(3, size).to(dtype) for _ in range(2))
    weight = torch.rand(size).to(dtype) + 0.5
    summed = (x.float() + delta.float()).to(dtype).double()
    stream = x.to(DEVICE)
    normed = add_norm(stream, delta.to(DEVICE), weight.to(DEVICE), 1e-5)
    assert torch.equal(stream.cpu().double(), summed)
    wanted = F.rms_norm(summed, (size,), weight.double(), 1e-5)
    torch.testing.assert_close(normed.cpu().double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    gate_up = torch.randn(3, 2 * size).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    found = swiglu(gate_up.to(DEVICE)).cpu().double()
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("family", "layers"),
    [("llama-mqa-bias", "triton"), ("qwen3", "triton"), ("gpt-oss", "torch"), ("deepseek-v3", "torch")],
)
def test_models(tmp_path, family, layers):
    """A prompt in two chunks beside another sequence, then a token of each."""
    make_folder(tmp_path, family, num_hidden_layers=2)
    logits = {}
    for attention, device in (("reference", torch.device("cpu")), ("triton", DEVICE)):
        model = load_model(EngineConfig(tmp_path, attention=attention), device)
        assert model.layers_name == (layers if attention == "triton" else "torch")
        hand = Hand(model)
        with device:
            steps = [
                hand.step({"a": random_ids(20, 1)}),
                hand.step({"a": random_ids(7, 2), "b": random_ids(9, 3)}),
                hand.step({"b": [7], "a": [9]}),
            ]
        logits[attention] = torch.cat([rows.cpu() for step in steps for rows in step.values()])
    torch.testing.assert_close(logits["triton"], logits["reference"], rtol=2e-4, atol=2e-4)
