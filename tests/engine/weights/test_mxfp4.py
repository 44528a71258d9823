"""MXFP4 experts as gpt-oss stores them, against transformers' own reading of the same tensors."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.models.loader import load_model
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders.families import make_folder, random_ids

IDS = random_ids(40, 3)
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.fixture
def folder(tmp_path):
    """A folder with random blocks, and the one with the floats that transformers makes of them beside it."""
    # Of 256 inputs a sum has 8 leaves, whole groups of 32 or not: floats and groups are added in one order.
    make_folder(tmp_path / "float", "gpt-oss", hidden_size=64, intermediate_size=256)
    tensors = load_file(tmp_path / "float" / "model.safetensors")
    packed, generator = dict(tensors), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, num_in, num_out = packed.pop(name).shape
        shape = (count, num_out, num_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "float" / "model.safetensors")
    save_file(packed, tmp_path / "model" / "model.safetensors")
    config = json.loads((tmp_path / "float" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


def logits(folder, **options) -> torch.Tensor:
    return ManualBatch(load_model(EngineConfig(folder, **options))).step({"a": IDS})["a"]


def test_read_without_loss(folder):
    """Expanded where they are applied, the weights are those of transformers; the native kernel rounds activations."""
    expected = logits(folder.parent / "float", linear="dense")
    assert torch.equal(logits(folder, linear="dense"), expected)
    model = load_model(EngineConfig(folder))
    assert "int8-g32" in model.weights.form
    error = (logits(folder) - expected).square().mean() / expected.square().mean()
    assert error < 3e-3


def refused(folder, **changed: torch.Tensor) -> str:
    path = folder / "model.safetensors"
    save_file(load_file(path) | changed, path)
    with pytest.raises(ModelError) as error:
        load_model(EngineConfig(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_scales_that_are_nan(folder):
    scales = load_file(folder / "model.safetensors")[SCALES]
    scales[3, 2, 1] = 255
    assert f"{SCALES} holds scales that are NaN" in refused(folder, **{SCALES: scales})


def test_blocks_of_another_shape(folder):
    blocks = torch.zeros(6, 64, 2, 16, dtype=torch.uint8)
    message = refused(folder, **{SCALES.replace("scales", "blocks"): blocks})
    assert "down_proj_blocks has shape [6, 64, 2, 16], config.json asks for [6, 64, 8, 16]" in message
