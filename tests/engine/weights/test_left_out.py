"""Which modules of a quantized folder are quantized: configs list them by the names of the files, and not all that are
left out."""

import json

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.weights.reading import assert_same_logits
from tests.support.model_folders import quantized_folders
from tests.support.model_folders.compressed import INT4, write_compressed

WITHIN = "model.language_model."
UP = "layers.1.mlp.up_proj"


def put_within(folder) -> None:
    """Make a text model one within Qwen3-VL, as that is published."""
    path = folder / "model.safetensors"
    tensors = {name.replace("model.", WITHIN, 1): value for name, value in load_file(path).items()}
    save_file(tensors, path)
    path = folder / "config.json"
    text = json.loads(path.read_text())
    outer = {key: text.pop(key) for key in ("quantization_config", "dtype")}
    text["model_type"] = "qwen3_vl_text"
    architectures = ["Qwen3VLForConditionalGeneration"]
    path.write_text(json.dumps(outer | dict(architectures=architectures, text_config=text)))


@pytest.mark.parametrize(
    ("writer", "listed"),
    [
        ("fp8", dict(modules_to_not_convert=[WITHIN + UP])),
        ("awq", dict(modules_to_not_convert=[WITHIN + UP])),
        ("gptq", dict(dynamic={rf"-:model\.language_model\.{UP}": {}})),
    ],
)
def test_a_module_listed_by_its_name_in_the_files(tmp_path, writer, listed):
    model = quantized_folders.dense_folder(tmp_path, "qwen3")
    meanings = getattr(quantized_folders, f"write_{writer}")(tmp_path, skip=(f"model.{UP}",), **listed)
    put_within(tmp_path)
    assert_same_logits(tmp_path, model, meanings)


def test_bits_given_by_names_in_the_files(tmp_path):
    model = quantized_folders.dense_folder(tmp_path, "qwen3")
    meanings = quantized_folders.write_gptq(
        tmp_path, bits=8, dynamic={r"model\.language_model\.layers\..*": {"bits": 8}}
    )
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    quantized_folders.change_config(tmp_path, quantization_config=config | dict(bits=4))
    put_within(tmp_path)
    assert_same_logits(tmp_path, model, meanings)


def test_targets_by_names_in_the_files(tmp_path):
    model = quantized_folders.dense_folder(tmp_path, "qwen3")
    groups = {"group_0": {"targets": [r"re:model\.language_model\.layers\..*_proj"], "weights": INT4}}
    meanings = write_compressed(tmp_path, "pack-quantized", INT4, config_groups=groups)
    put_within(tmp_path)
    assert_same_logits(tmp_path, model, meanings)


@pytest.mark.parametrize("writer", ["gptq", "awq", "fp8"])
def test_a_float_module_that_no_list_names(tmp_path, writer):
    """As the layer that predicts further tokens in DeepSeek's own FP8 folders."""
    model = quantized_folders.dense_folder(tmp_path)
    meanings = getattr(quantized_folders, f"write_{writer}")(tmp_path, skip=(f"model.{UP}",))
    assert_same_logits(tmp_path, model, meanings)
