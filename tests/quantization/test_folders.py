"""Read folders of `quantize` back by our own engine, and by transformers with compressed-tensors."""

import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.models.loader import Weights, load_model
from baton.engine.models.registry import read_spec
from baton.engine.weights.formats.registry import open_source
from baton.quantization import folder as folders
from baton.quantization import quantize as module
from baton.quantization.core.block import linear_shapes
from baton.quantization.quantize import plan, quantize
from baton.quantization.schemes import SCHEMES
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders.families import random_ids
from tests.support.model_folders.models_hard_to_quantize import blocks, make_family, samples

PUBLISHED = [name for name in SCHEMES if name != "int8-outlier"]
IDS = random_ids(40, 7)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("float"), "llama3.1")


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """scheme, group -> its folder, made once."""
    root, found = tmp_path_factory.mktemp("made"), {}

    def make(scheme: str, group: int | None = None):
        if (scheme, group) not in found:
            job = plan(model, scheme, group)
            quantize(job, root / f"{scheme}-{group}", samples() if job.scheme.calibrated else None)
            found[scheme, group] = root / f"{scheme}-{group}"
        return found[scheme, group]

    return make


def logits(folder, **options) -> torch.Tensor:
    loaded = load_model(EngineConfig(folder, dtype="fp32", **options))
    return ManualBatch(loaded).step({"a": IDS})["a"]


def in_transformers(folder, weights_only: bool) -> torch.Tensor:
    """Weights dequantized as it loads them, activations in floating point; or with its own rounding of activations."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if weights_only:
        config.quantization_config["dequantize"] = True
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    with torch.inference_mode():
        return loaded(torch.tensor([IDS])).logits[0]


def dense_of(model, quantized, tmp_path) -> torch.Tensor:
    """Our own logits with the quantized folder's weights expanded into the float model's place."""
    spec = read_spec(quantized)
    source = open_source(quantized, "auto", torch.float32, spec.num_heads, spec.num_kv_heads)
    tensors = {}
    for index in range(spec.num_layers):
        for name, shape in linear_shapes(spec).items():
            module = f"model.layers.{index}.{name}"
            tensors[f"{module}.weight"] = source.linear(module, *shape).dequantize()
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = f"model.layers.{index}.{name}.weight"
            tensors[norm] = source.tensor(norm, spec.hidden_size)
    tensors["model.embed_tokens.weight"] = source.tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    tensors["lm_head.weight"] = source.tensor("lm_head.weight", spec.vocab_size, spec.hidden_size)
    tensors["model.norm.weight"] = source.tensor("model.norm.weight", spec.hidden_size)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    return logits(tmp_path)


@pytest.mark.parametrize("scheme", PUBLISHED)
def test_transformers_reads_the_same_weights(model, made, tmp_path, scheme):
    """Activations left in floating point on both sides, so that weights alone are compared."""
    expected = dense_of(model, made(scheme), tmp_path)
    assert (in_transformers(made(scheme), weights_only=True) - expected).abs().max() < 1e-2


@pytest.mark.parametrize("scheme", [name for name in PUBLISHED if name.startswith("int4") or name.endswith("only")])
def test_transformers_serves_what_we_serve(made, scheme):
    """Our kernels for few bits may round activations too; the plain one does not."""
    assert (in_transformers(made(scheme), weights_only=False) - logits(made(scheme), linear="dense")).abs().max() < 1e-2


@pytest.mark.parametrize("linear", ["auto", "dense"])
@pytest.mark.parametrize("scheme", ("fp8", "fp8-static"))
def test_transformers_rounds_activations_to_fp8_as_we_do(made, scheme, linear):
    found = logits(made(scheme), linear=linear)
    differences = (in_transformers(made(scheme), weights_only=False) - found).abs().amax(dim=1)
    # An activation in the middle between two e4m3 goes either way with the last bit of the sums before it.
    assert (differences < 1e-2).sum() >= len(IDS) - 1 and differences.max() < 0.2


@pytest.mark.parametrize("scheme", ("int8", "smoothquant-w8a8"))
def test_transformers_rounds_activations_to_int8_as_finely_as_we_do(made, scheme):
    """compressed-tensors divides by 127.5 where we divide by 127: the roundings differ, their size does not."""
    found, expected = in_transformers(made(scheme), weights_only=False), logits(made(scheme))
    assert (found - expected).square().mean() < 0.08**2 * expected.square().mean()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_engine_serves_it_close_to_the_float_model(model, made, scheme):
    exact, found = logits(model), logits(made(scheme))
    error = ((found - exact).square().mean() / exact.square().mean()).sqrt()
    # A random model takes every error on to its logits; half of the bits, about sixteen times the error.
    assert error < {"int8": 0.1, "smoo": 0.1, "fp8": 0.3, "fp8-": 0.3, "int4": 0.8}[scheme[:4]]


@pytest.mark.parametrize("group", (32, 64))
@pytest.mark.parametrize("scheme", ("int4-awq", "int4-gptq"))
def test_calibrated_int4_beats_plain_rounding(model, made, scheme, group):
    exact = logits(model)

    def error(name):
        return (logits(made(name, group)) - exact).square().mean()

    assert error(scheme) < error("int4-rtn")


def test_outlier_columns_come_back(model, made):
    """Read by our own format: integers zero in the columns, bf16 beside them."""
    spec = read_spec(model)
    source = open_source(made("int8-outlier"), "auto", torch.float32, spec.num_heads, spec.num_kv_heads)
    shapes, (block, *_) = linear_shapes(spec), blocks(model)[2]
    kept = 0
    for name, shape in shapes.items():
        form = source.linear(f"model.layers.0.{name}", *shape)
        torch.testing.assert_close(form.dequantize(), block.weights[name], atol=0.03, rtol=0)
        if form.outliers is not None:
            kept += len(form.outliers.columns)
            assert (form.values[:, form.outliers.columns] == 0).all()
    assert kept > 0


@pytest.mark.parametrize("columns", ([3, 2], [0, 999], [-1, 4], [[1, 2]]))
def test_wrong_outlier_columns_are_refused(made, tmp_path, columns):
    folder = made("int8-outlier")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("outlier_columns"))
    save_file(tensors | {name: torch.tensor(columns)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ModelError, match=f"{name}.*ascending"):
        load_model(EngineConfig(tmp_path))


@pytest.mark.parametrize("family", ("llama-mqa-bias", "qwen2", "qwen3-tied"))
@pytest.mark.parametrize(
    ("scheme", "plain", "group"), [("smoothquant-w8a8", "int8", None), ("int4-awq", "int4-rtn", 32)]
)
def test_calibrated_schemes_serve_other_families(tmp_path, family, scheme, plain, group):
    """Biases, q and k norms and tied heads survive the folding."""
    model = make_family(tmp_path / "float", family, torch.bfloat16)
    errors, exact = {}, logits(model)
    for name in (scheme, plain):
        quantize(plan(model, name, group), tmp_path / name, samples())
        errors[name] = (logits(tmp_path / name) - exact).square().mean()
    assert errors[scheme] < 1.5 * errors[plain]


def test_a_head_of_its_own_beside_tied_embeddings_is_kept(tmp_path):
    """Without it the folder would serve the embedding in its place, and nothing would say so."""
    model = make_family(tmp_path / "float", "qwen3-tied", torch.bfloat16)
    tensors = load_file(model / "model.safetensors")
    head = {"lm_head.weight": torch.randn_like(tensors["model.embed_tokens.weight"])}
    save_file(tensors | head, model / "model.safetensors")
    quantize(plan(model, "int8"), tmp_path / "out")
    with pytest.raises(ModelError, match="tie_word_embeddings true; set it to false"):
        load_model(EngineConfig(tmp_path / "out"))
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"], head["lm_head.weight"])
    load_model(EngineConfig(tmp_path / "out"))


def test_several_shards_have_the_logits_of_one(model, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "SHARD_BYTES", 100_000)
    quantize(plan(model, "int8"), tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    monkeypatch.undo()
    quantize(plan(model, "int8"), tmp_path / "whole")
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "whole"))


def test_other_files_come_along(model, tmp_path):
    source = tmp_path / "float"
    source.mkdir()
    for path in model.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tools = "additional_chat_templates/tool_use.jinja"  # that the gateway reads
    (source / tools).parent.mkdir()
    for name in ("LICENSE", "tokenizer.json", "pytorch_model.bin", "chat_template.jinja", tools):
        (source / name).write_text(name)
    quantize(plan(source, "int8"), tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"LICENSE", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= names
    assert "pytorch_model.bin" not in names and (tmp_path / "out" / tools).read_text() == tools


def test_an_interrupted_run_leaves_nothing(model, tmp_path):
    job = plan(model, "int4-gptq", 32)
    calls = []

    def interrupted(block, stage, settings):
        calls.append(block.index)
        if block.index == 1:
            raise KeyboardInterrupt
        return job.scheme.round(block, stage, settings)

    with pytest.raises(KeyboardInterrupt):
        quantize(replace(job, scheme=replace(job.scheme, round=interrupted)), tmp_path / "out", samples())
    assert 1 in calls and not list(tmp_path.iterdir())


def test_one_layer_at_a_time(model, tmp_path, monkeypatch):
    """A layer's float weights are gone before the next one's are read."""
    alive, most = weakref.WeakSet(), []

    class Counted(module.Block):
        def __init__(self, *args):
            gc.collect()
            most.append(len(alive))
            alive.add(self)
            super().__init__(*args)

    monkeypatch.setattr(module, "Block", Counted)
    quantize(plan(model, "int4-gptq", 32), tmp_path / "out", samples())
    assert most == [0, 0]


def test_tensors_are_named_once(made):
    for scheme in SCHEMES:
        weights = Weights(made(scheme))
        assert "model.norm.weight" in weights and "model.layers.1.mlp.down_proj.weight_scale" in weights
