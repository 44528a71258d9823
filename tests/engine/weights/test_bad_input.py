"""A quantized model that cannot be right ends with one line that names the file and the tensor."""

import json

import pytest
import torch

from baton.engine.core.config import QUANTIZATIONS, EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.models.loader import load_model
from baton.engine.weights.formats.registry import CHOICES
from tests.support.model_folders import quantized_folders
from tests.support.model_folders.families import make_folder

PROJECTION = "model.layers.1.mlp.up_proj"


@pytest.fixture(params=["gptq", "awq", "fp8"])
def folder(request, tmp_path):
    quantized_folders.dense_folder(tmp_path)
    getattr(quantized_folders, f"write_{request.param}")(tmp_path)
    return tmp_path


@pytest.fixture
def gptq(tmp_path):
    quantized_folders.dense_folder(tmp_path)
    quantized_folders.write_gptq(tmp_path)
    return tmp_path


def assert_refused(folder, *parts: str):
    with pytest.raises(ModelError) as error:
        load_model(EngineConfig(folder))
    message = str(error.value)
    assert "\n" not in message
    for part in (str(folder), *parts):
        assert part in message, message


def scale_of(tensors) -> str:
    return next(name for name in tensors if name.startswith(PROJECTION) and "scale" in name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(folder, value):
    def change(tensors):
        tensors[scale_of(tensors)][0, 0] = value

    quantized_folders.change_tensors(folder, change)
    assert_refused(folder, "model.safetensors", PROJECTION, "NaN or infinite")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", [f"{PROJECTION}.weight", "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"]
)
def test_weights_that_are_not_finite(tmp_path, name, value):
    """Every answer was one token for ever, as a success."""
    quantized_folders.dense_folder(tmp_path)

    def change(tensors):
        tensors[name].flatten()[-1] = value

    quantized_folders.change_tensors(tmp_path, change)
    assert_refused(tmp_path, "model.safetensors", name, "NaN or infinite")


def test_scales_of_the_wrong_shape(folder):
    def change(tensors):
        name = scale_of(tensors)
        tensors[name] = torch.cat((tensors[name], tensors[name]))

    quantized_folders.change_tensors(folder, change)
    assert_refused(folder, "model.safetensors", PROJECTION, "has shape")


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_missing_part(gptq, part):
    quantized_folders.change_tensors(gptq, lambda tensors: tensors.pop(f"{PROJECTION}.{part}"))
    assert_refused(gptq, "model.safetensors", f"tensor {PROJECTION}.{part} is missing")


def test_integers_that_are_no_words(gptq):
    name = f"{PROJECTION}.qweight"
    quantized_folders.change_tensors(gptq, lambda tensors: tensors.update({name: tensors[name].float()}))
    assert_refused(gptq, f"tensor {name} is torch.float32", "int32")


def test_an_order_that_fills_no_groups(gptq):
    name = f"{PROJECTION}.g_idx"
    quantized_folders.change_tensors(gptq, lambda tensors: tensors[name].fill_(1))
    assert_refused(gptq, f"tensor {name}", "does not give each of 2 groups 32 inputs")


def test_a_symmetric_config_with_zero_points(tmp_path):
    """A version 2 file that calls itself version 1 looks like this, too."""
    quantized_folders.dense_folder(tmp_path)
    quantized_folders.write_gptq(tmp_path, version="gptq_v2")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    quantized_folders.change_config(tmp_path, quantization_config=config | {"checkpoint_format": "gptq"})
    assert_refused(tmp_path, "qzeros", "config.json says sym", "gptq_v2")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (dict(group_size=48), ("groups of 48 do not divide",)),
        (dict(bits=8), ("has shape", "qweight")),
        (dict(bits=3), ("3 bits is not supported", "4 and 8")),
        (dict(checkpoint_format="marlin"), ("'marlin' is not supported", "gptq_v2")),
        (
            dict(quant_method="hqq"),
            ("method hqq is not supported", "gptq, awq, fp8, compressed-tensors, bitsandbytes,"),
        ),
        (dict(quant_method="mxfp4"), ("proj.weight is missing",)),
        (dict(quant_method="modelopt", quant_algo="NVFP4"), ("method modelopt (NVFP4) is not supported",)),
        (dict(quant_method=None), ("(none given) is not supported",)),
        (dict(quant_method="awq"), ("has shape", "qweight")),
        (dict(quant_method="fp8"), ("weight", "missing")),
        (dict(quant_method="bitsandbytes", load_in_4bit=True), ("is missing, config.json says load_in_4bit",)),
        (dict(quant_method="compressed-tensors"), ("config_groups is missing or empty",)),
    ],
    ids=str,
)
def test_a_config_that_contradicts_the_tensors(gptq, changes, parts):
    config = json.loads((gptq / "config.json").read_text())["quantization_config"]
    quantized_folders.change_config(gptq, quantization_config=config | changes)
    assert_refused(gptq, *parts)


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("gptq", dict(group_size="32"), "group_size is '32', not a positive integer"),
        ("gptq", dict(group_size=0), "group_size is 0, not a positive integer"),
        ("gptq", dict(group_size=None), "group_size is None, not a positive integer"),
        ("gptq", dict(dynamic={"(": {}}), "a value cannot be used for model.layers.0.self_attn.q_proj"),
        ("gptq", dict(dynamic={".*": 5}), "a value cannot be used for model.layers.0.self_attn.q_proj"),
        ("gptq", dict(modules_in_block_to_quantize=5), "a value cannot be used for model.layers.0.self_attn.q_proj"),
        ("awq", dict(modules_to_not_convert=[3]), "a value cannot be used for model.layers.0.self_attn.q_proj"),
        ("awq", dict(group_size=True), "group_size is True, not a positive integer"),
        ("fp8", dict(weight_block_size=[128]), "blocks of scales are [128], not two positive integers"),
        ("fp8", dict(weight_block_size=[0, 128]), "blocks of scales are [0, 128], not two positive integers"),
        ("fp8", dict(weight_block_size=5), "a value cannot be used for model.layers.0.self_attn.q_proj"),
        ("fp8", dict(ignored_layers=7), "a value cannot be used for model.layers.0.self_attn.q_proj"),
        ("fp8", dict(quant_method="compressed-tensors", config_groups="all"), "'str' object has no attribute 'values'"),
    ],
    ids=str,
)
def test_a_config_whose_values_have_the_wrong_type(tmp_path, kind, changes, told):
    quantized_folders.dense_folder(tmp_path)
    getattr(quantized_folders, f"write_{kind}")(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    quantized_folders.change_config(tmp_path, quantization_config=config | changes)
    assert_refused(tmp_path, "config.json: quantization_config: ", told)


def test_awq_that_scales_an_activation(tmp_path):
    """As AutoAWQ does where no linear is before it that would take the scales: of StarCoder2 among others."""
    quantized_folders.dense_folder(tmp_path, "starcoder2")
    quantized_folders.write_awq(tmp_path)
    load_model(EngineConfig(tmp_path))
    name = "model.layers.1.mlp.act.scales"
    quantized_folders.change_tensors(tmp_path, lambda tensors: tensors.update({name: torch.full((128,), 2.0)}))
    told = f"tensor {name} divides what an activation says (AutoAWQ), which is not supported"
    assert_refused(tmp_path, "model.safetensors", told)


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.self_attn.q_norm.weight", "model.layers.2.input_layernorm.weight", f"{PROJECTION}.bias"],
)
def test_a_tensor_of_a_layer_that_the_config_does_not_describe(folder, name):
    """It was served without, as if the tensor were not there."""
    quantized_folders.change_tensors(folder, lambda tensors: tensors.update({name: torch.full((64,), 0.5)}))
    told = f"tensor {name} has no place in the model that config.json describes"
    assert_refused(folder, "model.safetensors", told)


def test_a_layer_more_than_the_config_has(folder):
    quantized_folders.change_config(folder, num_hidden_layers=1)
    assert_refused(folder, "model.safetensors", "tensor model.layers.1.", "has no place in the model")


def test_what_formats_store_beside_a_model_is_left(folder):
    """Biases of zeros, as AutoGPTQ writes for linears without any; scales of KV; orders; old buffers; a vision
    encoder."""
    names = ["self_attn.k_scale", "self_attn.kv_scale", "self_attn.rotary_emb.inv_freq", "self_attn.o_proj.g_idx"]
    names += ["self_attn.o_proj.input_scale", "self_attn.v_proj.v_scale", "self_attn.o_proj.qzeros"]
    more = {f"model.layers.0.{name}": torch.ones(1) for name in names}
    more |= {f"{PROJECTION}.bias": torch.zeros(64), "vision_tower.layers.0.weight": torch.ones(1)}
    quantized_folders.change_tensors(folder, lambda tensors: tensors.update(more | tensors))
    load_model(EngineConfig(folder))


def test_a_config_without_the_tensors(tmp_path):
    quantized_folders.dense_folder(tmp_path)
    quantized_folders.change_config(tmp_path, quantization_config=dict(quant_method="gptq", bits=4, group_size=32))
    assert_refused(tmp_path, "qweight is missing")


def test_tensors_without_the_config(gptq):
    quantized_folders.change_config(gptq, quantization_config=None)
    assert_refused(gptq, "weight is missing")


@pytest.mark.parametrize("layout", ["nvfp4-pack-quantized", "marlin-24"])
def test_layouts_of_compressed_tensors_that_are_not_read(gptq, layout):
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}
    config = dict(quant_method="compressed-tensors", format=layout, config_groups=groups)
    quantized_folders.change_config(gptq, quantization_config=config)
    assert_refused(gptq, "config.json", f"'{layout}' is not supported", "pack-quantized")


def test_a_shard_of_another_model(tmp_path):
    make_folder(tmp_path / "one", "qwen3").save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    (tmp_path / "sharded" / files[0]).write_bytes((tmp_path / "sharded" / files[1]).read_bytes())
    assert_refused(tmp_path / "sharded", ".safetensors")


def test_choices_are_the_settings():
    assert QUANTIZATIONS == CHOICES


@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
def test_a_quantized_folder_is_not_quantized_again(gptq, quantization):
    with pytest.raises(ValueError, match=rf"quantization {quantization}: .* is already quantized \(gptq\)"):
        load_model(EngineConfig(gptq, quantization=quantization))


def test_unknown_choice(gptq):
    with pytest.raises(ValueError, match="quantization 'int3': one of auto, none, int8"):
        load_model(EngineConfig(gptq, quantization="int3"))


def test_a_rounding_whose_group_does_not_divide(tmp_path):
    make_folder(tmp_path, "qwen3")
    with pytest.raises(ModelError, match="q_proj.weight: groups of 32 do not divide 48 inputs"):
        load_model(EngineConfig(tmp_path, quantization="int4-g32"))
