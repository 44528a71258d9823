"""Rounding to nearest, and dense folders that are rounded as they are loaded."""

import pytest
import torch

from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.models.loader import load_model
from baton.engine.start_line import start_line
from baton.engine.weights.round import round_asymmetric, round_fp8, round_symmetric
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders import quantized_folders
from tests.support.model_folders.families import random_ids

IDS = random_ids(40, 1)


def weight() -> torch.Tensor:
    values = torch.randn(48, 128, generator=torch.Generator().manual_seed(0)) + 0.3
    values[5] = 0
    return values


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("rounding", [round_symmetric, round_asymmetric])
def test_no_value_is_further_than_half_a_step(bits, group, rounding):
    rounded = rounding(weight(), bits, group)
    steps = rounded.scales.repeat_interleave(rounded.group, dim=1)
    assert (rounded.bits, rounded.group) == (bits, group or 128)
    assert ((rounded.dequantize() - weight()).abs() <= steps * 0.5001 + 1e-6).all()
    assert torch.equal(rounded.dequantize()[5], torch.zeros(128))


def test_asymmetric_zero_points_are_integers():
    """So that formats which store them can hold what was rounded."""
    rounded = round_asymmetric(weight(), 4, 32)
    zeros = 8 - (rounded.offsets / rounded.scales)[rounded.scales > 0]
    torch.testing.assert_close(zeros, zeros.round(), atol=1e-4, rtol=0)
    assert zeros.min() >= -1e-4 and zeros.max() <= 15.0001


def test_fp8_is_within_its_mantissa():
    rounded = round_fp8(weight(), "dynamic")
    error = (rounded.dequantize() - weight()).abs()
    assert (error <= weight().abs() / 16 + rounded.scales * 2**-9).all()
    assert torch.equal(rounded.dequantize()[5], torch.zeros(128))


def test_a_group_that_does_not_divide():
    with pytest.raises(ValueError, match="groups of 48 do not divide 128 inputs"):
        round_symmetric(weight(), 4, 48)


@pytest.mark.parametrize(
    ("quantization", "form", "rounding", "head"),
    [
        ("int8", "int8-dynamic", lambda w: round_symmetric(w, 8), None),
        ("int8-weight-only", "int8", lambda w: round_symmetric(w, 8), None),
        ("fp8", "fp8-row-dynamic", round_fp8, None),
        ("int4-g32", "int4-g32-asym+int8", lambda w: round_asymmetric(w, 4, 32), lambda w: round_symmetric(w, 8)),
    ],
)
def test_loaded_rounded(tmp_path, quantization, form, rounding, head):
    """As the dense model has it with the rounded weights; activations are left alone by the kernel that expands."""
    model = quantized_folders.dense_folder(tmp_path)
    meanings = {
        name: (head if head and name == "lm_head" else rounding)(module.weight.detach()).dequantize()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    loaded = load_model(EngineConfig(tmp_path, linear="dense", quantization=quantization))
    assert loaded.weights.form == form
    with torch.inference_mode():
        theirs = quantized_folders.with_meanings(model, meanings)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(ManualBatch(loaded).step({"a": IDS})["a"], theirs, atol=1e-3, rtol=0)


def test_a_tied_head_is_rounded_and_its_embedding_is_not(tmp_path):
    model = quantized_folders.dense_folder(tmp_path, "llama3.2-tied")
    loaded = load_model(EngineConfig(tmp_path, quantization="int4-g32"))
    assert loaded.weights.form == "int4-g32-asym+int8"
    assert torch.equal(loaded.embedding(torch.arange(9)), model.get_input_embeddings().weight[:9])


def test_the_start_line_says_so(tmp_path):
    quantized_folders.dense_folder(tmp_path)
    engine = Engine.load(EngineConfig(tmp_path, quantization="int8", num_blocks=20))
    assert engine.numerics_class.weights == engine.weight_form == "int8-dynamic"
    assert "weights int8-dynamic (" in start_line(engine) and "MiB in files" in start_line(engine)
