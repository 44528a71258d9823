"""bitsandbytes folders, written with its own functions, against its own dequantization."""

import pytest
import torch

from baton.engine.core.config import EngineConfig
from baton.engine.models.loader import load_model
from baton.engine.weights.forms import DenseWeight, IntWeight
from tests.engine.weights.reading import assert_reads, assert_same_logits, read_all
from tests.support.model_folders import quantized_folders


@pytest.fixture(scope="module")
def functional():
    """Imported where it is needed: torch's compiler comes along, 1 s of CPU in each process that collects tests."""
    from bitsandbytes import functional

    return functional


def test_an_int8_folder_means_what_bitsandbytes_reads(functional, tmp_path):
    def write(weight):
        values, scb, _ = functional.int8_vectorwise_quant(weight)
        parts = {"weight": values, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return parts, functional.int8_vectorwise_dequant(values, scb)

    model = quantized_folders.dense_folder(tmp_path)
    meanings = quantized_folders.rewrite(tmp_path, dict(quant_method="bitsandbytes", load_in_8bit=True), write)
    assert all(isinstance(weight, IntWeight) for weight in assert_reads(tmp_path, meanings).values())
    assert_same_logits(tmp_path, model, meanings)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bit_floats_are_expanded(functional, tmp_path, kind, nested):
    def write(weight):
        values, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        parts = {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        return {"weight": values} | parts, functional.dequantize_4bit(values, state)

    model = quantized_folders.dense_folder(tmp_path)
    config = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type=kind)
    meanings = quantized_folders.rewrite(tmp_path, config, write)
    for module, weight in read_all(tmp_path, meanings).items():
        assert isinstance(weight, DenseWeight)
        torch.testing.assert_close(weight.values, meanings[module], atol=1e-5, rtol=1e-5)
    assert_same_logits(tmp_path, model, meanings)
    assert f"14 x {kind} expanded to dense" in load_model(EngineConfig(tmp_path)).weights.notes


def test_modules_left_out(functional, tmp_path):
    def write(weight):
        values, scb, _ = functional.int8_vectorwise_quant(weight)
        return {"weight": values, "SCB": scb}, functional.int8_vectorwise_dequant(values, scb)

    model = quantized_folders.dense_folder(tmp_path)
    skip = tuple(f"model.layers.{layer}.self_attn.v_proj" for layer in range(2))
    config = dict(quant_method="bitsandbytes", load_in_8bit=True, llm_int8_skip_modules=["v_proj", "lm_head"])
    meanings = quantized_folders.rewrite(tmp_path, config, write, skip)
    assert_same_logits(tmp_path, model, meanings)
