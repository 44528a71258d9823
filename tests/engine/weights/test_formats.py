"""Each published format against its meaning: the form that is read dequantizes to it, and the model's logits are those
of the dense model that has these weights."""

import json

import pytest
import torch

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.models.loader import load_model
from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight
from tests.engine.weights.reading import IDS, assert_reads, assert_same_logits, read_all
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders import quantized_folders


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(sym=False),
        dict(sym=False, version="gptq_v2"),
        dict(version="gptq_v2"),
        dict(act_order=True),
        dict(act_order=True, sym=False),
        dict(bits=8),
        dict(bits=8, sym=False, act_order=True, version="gptq_v2"),
        dict(group=-1),
        dict(head=True, lm_head=True),
    ],
    ids=str,
)
def test_a_gptq_folder_is_read(tmp_path, options):
    model = quantized_folders.dense_folder(tmp_path)
    meanings = quantized_folders.write_gptq(tmp_path, **options)
    weights = assert_reads(tmp_path, meanings)
    for weight in weights.values():
        assert isinstance(weight, IntWeight) and weight.bits == options.get("bits", 4)
        assert (weight.offsets is None) == options.get("sym", True)
        assert (weight.order is not None) == options.get("act_order", False)
    assert_same_logits(tmp_path, model, meanings)


def test_a_gptq_version_by_its_other_name(tmp_path):
    """GPTQModel reads `format` too; each zero point was off by one."""
    model = quantized_folders.dense_folder(tmp_path)
    meanings = quantized_folders.write_gptq(tmp_path, sym=False, version="gptq_v2")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config["format"] = config.pop("checkpoint_format")
    quantized_folders.change_config(tmp_path, quantization_config=config)
    assert_same_logits(tmp_path, model, meanings)


def test_a_quantized_head_beside_tied_embeddings(tmp_path):
    quantized_folders.dense_folder(tmp_path)
    quantized_folders.write_gptq(tmp_path, head=True, lm_head=True)
    quantized_folders.change_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ModelError, match="lm_head.qweight is of a head of its own, and config.json has tie_word_emb"):
        load_model(EngineConfig(tmp_path))


def test_gptq_with_modules_left_out(tmp_path):
    model = quantized_folders.dense_folder(tmp_path)
    skip = tuple(f"model.layers.{layer}.mlp.down_proj" for layer in range(2))
    dynamic = {r"-:.*\.down_proj": {}}
    meanings = quantized_folders.write_gptq(tmp_path, skip=skip, dynamic=dynamic)
    assert_same_logits(tmp_path, model, meanings)


def test_gptq_of_before_transformers(tmp_path):
    """quantize_config.json, and nothing in config.json."""
    model = quantized_folders.dense_folder(tmp_path)
    meanings = quantized_folders.write_gptq(tmp_path)
    config = tmp_path / "config.json"
    content = json.loads(config.read_text())
    (tmp_path / "quantize_config.json").write_text(json.dumps(content.pop("quantization_config")))
    config.write_text(json.dumps(content))
    assert_same_logits(tmp_path, model, meanings)


@pytest.mark.parametrize("options", [dict(), dict(sym=True), dict(group=64)], ids=str)
def test_an_awq_folder_is_read(tmp_path, options):
    model = quantized_folders.dense_folder(tmp_path, "qwen2", num_attention_heads=4)
    meanings = quantized_folders.write_awq(tmp_path, **options)
    weights = assert_reads(tmp_path, meanings)
    assert all(weight.bits == 4 for weight in weights.values())
    assert_same_logits(tmp_path, model, meanings)


def test_awq_with_modules_left_out(tmp_path):
    model = quantized_folders.dense_folder(tmp_path)
    skip = ("model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj")
    meanings = quantized_folders.write_awq(tmp_path, skip=skip, modules_to_not_convert=["o_proj"])
    assert_same_logits(tmp_path, model, meanings)


@pytest.mark.parametrize(
    ("options", "activations"),
    [
        (dict(), "dynamic-block"),
        (dict(block=(32, 32)), "dynamic-block"),
        (dict(spread="row"), "dynamic"),
        (dict(spread="tensor"), "dynamic"),
        (dict(spread="tensor", static=True), "static"),
    ],
    ids=str,
)
def test_an_fp8_folder_is_read(tmp_path, options, activations):
    sizes = dict(hidden_size=160, intermediate_size=320, num_attention_heads=4)  # no multiple of 128
    model = quantized_folders.dense_folder(tmp_path, **sizes)
    meanings = quantized_folders.write_fp8(tmp_path, **options)
    weights = assert_reads(tmp_path, meanings)
    assert all(isinstance(weight, Fp8Weight) and weight.activations == activations for weight in weights.values())
    assert_same_logits(tmp_path, model, meanings)


def test_fp8_with_modules_left_out(tmp_path):
    model = quantized_folders.dense_folder(tmp_path)
    skip = ("model.layers.1.mlp.up_proj",)
    meanings = quantized_folders.write_fp8(tmp_path, spread="row", skip=skip, ignored_layers=list(skip))
    assert isinstance(read_all(tmp_path, {skip[0]: torch.zeros(128, 64)})[skip[0]], DenseWeight)
    assert_same_logits(tmp_path, model, meanings)


@pytest.mark.parametrize(
    ("writer", "options", "tolerance"),
    [
        ("gptq", dict(), 0.1),
        ("gptq", dict(act_order=True, sym=False), 0.1),
        ("gptq", dict(bits=8), 0.1),
        ("awq", dict(), 0.1),
        ("fp8", dict(block=(32, 32)), 0.3),
        ("fp8", dict(spread="row"), 0.3),
    ],
    ids=str,
)
def test_the_kernel_that_auto_takes(tmp_path, writer, options, tolerance):
    """bf16 with whatever kernel fits, near the kernel that expands. Weights this wide make about ten times as much of
    every error, and e4m3 activations have one of 2.5 %."""
    quantized_folders.dense_folder(tmp_path, dtype=torch.bfloat16)
    getattr(quantized_folders, f"write_{writer}")(tmp_path, **options)
    models = (load_model(EngineConfig(tmp_path, linear=linear)) for linear in ("auto", "dense"))
    auto, plain = (ManualBatch(model, form="bf16").step({"a": IDS})["a"] for model in models)
    assert (auto - plain).norm() / plain.norm() < tolerance


def test_outlier_columns(tmp_path):
    """Our own layout, for what no other holds; q, k and v share their columns and so one product."""

    def write(weight):
        columns = torch.arange(3, weight.shape[1], 17)
        rest, kept = weight.clone(), weight[:, columns].bfloat16()
        rest[:, columns] = 0
        scales = rest.abs().amax(dim=1, keepdim=True) / 127
        values = torch.round(rest / scales).to(torch.int8)
        meaning = values * scales
        meaning[:, columns] = kept.float()
        parts = {"weight": values, "weight_scale": scales, "outlier_columns": columns, "outlier_weight": kept}
        return parts, meaning

    model = quantized_folders.dense_folder(tmp_path)
    config = dict(quant_method="baton", scheme="int8-outlier", ignore=["lm_head"])
    meanings = quantized_folders.rewrite(tmp_path, config, write)
    assert_reads(tmp_path, meanings)
    assert_same_logits(tmp_path, model, meanings)
    assert load_model(EngineConfig(tmp_path)).weights.form == "int8-outliers-dynamic+fp32"
