"""Wrong input to `baton quantize` and `baton eval`: exit status 2, one line that names it, nothing half-written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from baton.cli.models import eval as evaluate
from baton.cli.models import quantize
from baton.quantization.quantize import plan
from baton.quantization.quantize import quantize as make
from tests.cli.models.calls import call
from tests.support.model_folders.models_hard_to_quantize import make_demo_like

WEIGHTS = "model.safetensors"
PROJECTION = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_demo_like(tmp_path_factory.mktemp("models") / "float")


@pytest.fixture(scope="module")
def int4(model, tmp_path_factory):
    """The model in groups of 32, as compressed-tensors stores them."""
    folder = tmp_path_factory.mktemp("models") / "int4"
    make(plan(model, "int4-rtn", 32), folder)
    return folder


def change(folder, name: str, value) -> None:
    """value: what becomes of the tensor, None: nothing."""
    tensors = load_file(folder / WEIGHTS)
    tensor = value(tensors.pop(name))
    save_file(tensors if tensor is None else tensors | {name: tensor}, folder / WEIGHTS)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[3, 1] = float("nan")
    return tensor


def truncate(folder) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


def mix_shards(folder) -> None:
    """Two shards, each the whole model."""
    (folder / "a.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
    (folder / WEIGHTS).rename(folder / "b.safetensors")
    names = load_file(folder / "a.safetensors")
    files = dict.fromkeys(names, "a.safetensors") | {next(iter(names)): "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def lack_one(folder) -> None:
    change(folder, f"{PROJECTION}.weight", lambda tensor: None)


DAMAGED = {
    "truncated": (truncate, (WEIGHTS, "truncated")),
    "mixed shards": (mix_shards, ("b.safetensors", "shards are mixed")),
    "a tensor missing": (lack_one, (WEIGHTS, f"{PROJECTION}.weight is missing")),
    "NaN": (
        lambda folder: change(folder, f"{PROJECTION}.weight", with_nan),
        (f"{PROJECTION}.weight holds values that are NaN",),
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("scheme", ["int8", "int4-gptq"])
def test_a_damaged_model_is_not_quantized(model, tmp_path, capsys, damage, scheme):
    hurt, parts = DAMAGED[damage]
    hurt(shutil.copytree(model, tmp_path / "model"))
    assert call(quantize, "--model", tmp_path / "model", "--out", tmp_path / "out", "--scheme", scheme) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert all(part in said for part in parts), said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("lines", "message"), [("", "empty"), ('{"text": "a"}\nhello\n', "line 2: not JSON")])
def test_calibration_that_is_none(model, tmp_path, capsys, lines, message):
    (tmp_path / "prompts.jsonl").write_text(lines)
    words = ["--scheme", "int4-awq", "--calibration", tmp_path / "prompts.jsonl"]
    assert call(quantize, "--model", model, "--out", tmp_path / "out", *words) == 2
    error = capsys.readouterr().err
    assert "prompts.jsonl" in error and message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_a_token_beyond_the_vocabulary_is_named(model, tmp_path, capsys):
    """One of a tokenizer.json that is not this model's."""
    folder = shutil.copytree(model, tmp_path / "model")
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<{number}>" for number in range(size)])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = " ".join(f"fox <{number}>" for number in range(size))
    (tmp_path / "text").write_text(text)
    (tmp_path / "prompts").write_text(json.dumps({"text": f"the fox and <{size - 1}> " * 8}) + "\n")
    awq = ("--out", tmp_path / "out", "--scheme", "int4-awq", "--calibration", tmp_path / "prompts")
    for command, words in ((evaluate, ("--text", tmp_path / "text")), (quantize, awq)):
        assert call(command, "--model", folder, *words) == 2
        error = capsys.readouterr().err
        named = f"{folder / 'tokenizer.json'}: token '<{size - 1}>' has id"
        assert named in error and f"the model has {size}" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def _config(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


SCALE, PACKED = f"{PROJECTION}.weight_scale", f"{PROJECTION}.weight_packed"
CONTRADICTORY = {
    "truncated": (truncate, (WEIGHTS, "truncated")),
    "NaN scales": (lambda folder: change(folder, SCALE, with_nan), (WEIGHTS, SCALE, "NaN")),
    "scales of the wrong shape": (
        lambda folder: change(folder, SCALE, lambda scales: scales[:, :1].contiguous()),
        (WEIGHTS, SCALE, "has shape"),
    ),
    "a group that does not divide": (lambda folder: _config(folder, group_size=48), (WEIGHTS, "do not divide")),
    "another group": (lambda folder: _config(folder, group_size=64), (WEIGHTS, "weight_scale has shape")),
    "other bits": (lambda folder: _config(folder, num_bits=8), (WEIGHTS, "weight_packed has shape")),
    "floats for words": (lambda folder: change(folder, PACKED, torch.Tensor.float), (WEIGHTS, PACKED, "float32")),
}


@pytest.mark.parametrize("damage", CONTRADICTORY)
def test_a_quantized_model_that_contradicts_itself(int4, tmp_path, capsys, damage):
    hurt, parts = CONTRADICTORY[damage]
    hurt(shutil.copytree(int4, tmp_path / "model"))
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog.\n")
    assert call(evaluate, "--model", tmp_path / "model", "--text", tmp_path / "text") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(part in error for part in parts), error
