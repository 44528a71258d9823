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
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders.families import make_folder, random_ids
from tests.support.model_folders.weight_forms import FORMS

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = pytest.mark.skipif(
    bool(kernels.unavailable(DEVICE.type)), reason=kernels.unavailable(DEVICE.type) or "there"
)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [48, 1000])
def test_norm_and_swiglu_of_rows_are_those_of_torch(size, dtype):
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


ROUNDINGS = {
    "int8": (torch.int8, 0, 0.0), "e4m3": (torch.float8_e4m3fn, 0, 0.0), "blocks": (torch.float8_e4m3fn, 128, 0.0),
    "static": (torch.float8_e4m3fn, 0, 0.013),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("size", [128, 1280])
def test_rows_rounded_where_they_are_made(name, size):
    """To the bits of a kernel of its own, which are those of the torch twin."""
    from baton.engine.kernels import quantize, rows
    from baton.engine.layers.linear.rounding import rounded_to_e4m3

    rounding = quantize.Rounding(*ROUNDINGS[name])
    torch.manual_seed(size)
    x, delta, weight = (torch.randn(n, size).bfloat16().to(DEVICE) for n in (5, 5, 1))
    x[3], delta[3] = 0, 0  # a row of zeros has a scale too
    gate_up = torch.randn(5, 2 * size).bfloat16().to(DEVICE)
    for made, plain in (
        (rows.add_norm_rounded(x.clone(), delta, weight[0], 1e-5, rounding), rows.add_norm(x, delta, weight[0], 1e-5)),
        (rows.swiglu_rounded(gate_up, rounding), rows.swiglu(gate_up)),
    ):
        alone = quantize.round_rows(plain, rounding, None)
        assert torch.equal(made.values.view(torch.uint8), alone.values.view(torch.uint8))
        assert torch.equal(made.scales, alone.scales)
        spread = alone.scales.repeat_interleave(size // alone.scales.shape[1], 1)
        found = (alone.values.float() * spread).cpu()
        if name == "int8":
            scales = plain.float().abs().amax(1, keepdim=True) / 127
            wanted = torch.round(plain.float() / scales.clamp(min=1e-30)) * scales
        else:
            kind = {"e4m3": "dynamic", "blocks": "dynamic-block", "static": "static"}[name]
            wanted = rounded_to_e4m3(plain.float(), kind, 128, 0.013)
        torch.testing.assert_close(found, wanted.cpu(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["int8-dynamic", "fp8-row-dynamic", "fp8-32x32-dynamic-block", "fp8-tensor-static"])
def test_products_of_rounded_rows(form):
    """Rows rounded by the kernel before have the bits of those that the linear kernel rounds itself."""
    from baton.engine.kernels.quantize import round_rows
    from baton.engine.layers.linear.triton import GpuLinear
    from baton.engine.weights.formats.placed import placed

    torch.manual_seed(1)
    linear = GpuLinear(placed(FORMS[form]((70, 256)), DEVICE), None, torch.bfloat16, True)
    x = torch.randn(6, 256).bfloat16().to(DEVICE)
    assert linear.rounding is not None
    assert torch.equal(linear.of_rounded(round_rows(x, linear.rounding, None)), linear(x))


@pytest.mark.parametrize(
    ("family", "layers"),
    [("llama-mqa-bias", "triton"), ("qwen3", "triton"), ("gpt-oss", "torch"), ("deepseek-v3", "torch")],
)
def test_models_equal_the_reference_on_cpu(tmp_path, family, layers):
    """A prompt in two chunks beside another sequence, then a token of each."""
    make_folder(tmp_path, family, num_hidden_layers=2)
    logits = {}
    for attention, device in (("reference", torch.device("cpu")), ("triton", DEVICE)):
        model = load_model(EngineConfig(tmp_path, attention=attention), device)
        assert model.layers_name == (layers if attention == "triton" else "torch")
        hand = ManualBatch(model)
        with device:
            steps = [
                hand.step({"a": random_ids(20, 1)}),
                hand.step({"a": random_ids(7, 2), "b": random_ids(9, 3)}),
                hand.step({"b": [7], "a": [9]}),
            ]
        logits[attention] = torch.cat([rows.cpu() for step in steps for rows in step.values()])
    torch.testing.assert_close(logits["triton"], logits["reference"], rtol=2e-4, atol=2e-4)
