"""A .gguf file against gguf.quants, tensor by tensor, and against transformers' model with the weights it means."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType
from gguf import quants

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.engine.models.loader import load_model, model_identity
from baton.engine.models.registry import read_spec
from baton.engine.start_line import start_line
from baton.engine.weights.formats.gguf import READERS
from tests.support.engine.manual_batch import ManualBatch
from tests.support.gguf.model_files import encode, write_gguf
from tests.support.model_folders import quantized_folders
from tests.support.model_folders.families import LLAMA3, THETA, YARN, random_ids

IDS = random_ids(60, 2)
BIG = dict(hidden_size=256, intermediate_size=512)  # what blocks of 256 divide


def assert_same_logits(path, model, tolerance: float = 1e-4):
    ours = ManualBatch(load_model(EngineConfig(path, dtype="fp32", linear="dense"))).step({"a": IDS})["a"]
    with torch.inference_mode():
        theirs = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=tolerance * theirs.abs().max().item(), rtol=0)


@pytest.mark.parametrize("kind", READERS)
def test_blocks_mean_what_gguf_says(kind):
    """Q8_0, Q4_0 and Q6_K bit for bit; Q4_K has its offsets moved by 8 steps, which rounds once more in fp32."""
    raw = encode(np.random.default_rng(3).standard_normal((24, 1024), np.float32), kind)
    expected = torch.from_numpy(quants.dequantize(raw, kind))
    found = READERS[kind](torch.from_numpy(raw)).dequantize()
    if kind == GGMLType.Q4_K:
        torch.testing.assert_close(found, expected, atol=float(expected.abs().max()) * 2**-22, rtol=0)
    else:
        assert torch.equal(found, expected)


BETAS = {"beta_fast": 4.0, "beta_slow": 0.5}
FAMILIES = {
    "llama": ("llama3", {}),
    "llama3.1": ("llama3", dict(rope_parameters=THETA | LLAMA3)),
    "llama-tied": ("llama3.2-tied", {}),
    "llama-linear": ("llama-linear", {}),
    "llama-bias": ("llama3", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", dict(num_attention_heads=4)),
    "qwen2-yarn": ("qwen2", dict(num_attention_heads=4, rope_parameters=THETA | YARN)),
    "qwen2-yarn-betas": ("qwen2", dict(num_attention_heads=4, rope_parameters=THETA | YARN | BETAS)),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3-tied", {}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_read_from_gguf_as_from_its_folder(tmp_path, family):
    name, changes = FAMILIES[family]
    model = quantized_folders.dense_folder(tmp_path / "dense", name, **changes)
    write_gguf(tmp_path / "model.gguf", model)
    spec, dense = (read_spec(tmp_path / path) for path in ("model.gguf", "dense"))
    fields = ("family", "num_heads", "num_kv_heads", "head_dim", "windows", "qkv_bias", "qk_norm", "tied", "context")
    for field in fields:
        assert getattr(spec, field) == getattr(dense, field), field
    assert spec.name == "model"
    assert_same_logits(tmp_path / "model.gguf", model)


@pytest.mark.parametrize("key", ["rope.scale_linear", "rope.scaling.factor"])
def test_a_factor_without_a_type_is_linear(tmp_path, key):
    """As llama.cpp has it; the first is what older files call it."""
    model = quantized_folders.dense_folder(tmp_path / "dense", "llama-linear")
    scaled, path = model.config.rope_parameters, tmp_path / "model.gguf"
    model.config.rope_parameters = scaled | {"rope_type": "default"}
    write_gguf(path, model, describe=lambda writer: writer.add_float32(f"llama.{key}", scaled["factor"]))
    assert_same_logits(path, model)


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor", "yarn_ext_factor"])
def test_factors_of_scaling_that_are_refused(tmp_path, key):
    model, path = quantized_folders.dense_folder(tmp_path / "dense"), tmp_path / "model.gguf"
    write_gguf(path, model, describe=lambda writer: writer.add_float32(f"llama.rope.scaling.{key}", 0.5))
    with pytest.raises(ModelError, match=f"model.gguf: metadata: rope.scaling.{key} 0.5 is not supported"):
        load_model(EngineConfig(path))


def test_attention_both_ways_is_refused(tmp_path):
    model, path = (
        quantized_folders.dense_folder(tmp_path / "dense", "qwen2", num_attention_heads=4),
        tmp_path / "model.gguf",
    )
    write_gguf(path, model, describe=lambda writer: writer.add_causal_attention(True))
    read_spec(path)
    write_gguf(path, model, describe=lambda writer: writer.add_causal_attention(False))
    with pytest.raises(ModelError, match="model.gguf: metadata: attention.causal false is not supported"):
        load_model(EngineConfig(path))


def test_a_tensor_that_nothing_reads(tmp_path):
    model, path = quantized_folders.dense_folder(tmp_path / "dense"), tmp_path / "model.gguf"
    stray = np.ones(32, np.float32)
    write_gguf(path, model, describe=lambda writer: writer.add_tensor("blk.1.attn_q_norm.weight", stray))
    with pytest.raises(ModelError, match="model.gguf: tensor blk.1.attn_q_norm.weight has no place in the model"):
        load_model(EngineConfig(path))


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (GGMLType.F32, "fp32"),
        (GGMLType.F16, "fp16"),
        (GGMLType.BF16, "bf16"),
        (GGMLType.Q8_0, "int8-g32"),
        (GGMLType.Q4_0, "int4-g32"),
        (GGMLType.Q4_K, "int4-g32-asym"),
        (GGMLType.Q6_K, "int8-g16"),
        (GGMLType.Q5_0, "bf16"),
        (GGMLType.Q4_1, "bf16"),
    ],
)
def test_each_type_of_gguf_has_its_form_and_the_same_logits(tmp_path, kind, form):
    model = quantized_folders.dense_folder(tmp_path / "dense", "llama3.2-tied", **BIG)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, lambda name: kind)
    weights = load_model(EngineConfig(path)).weights
    assert weights.form == form
    expanded = kind in (GGMLType.Q5_0, GGMLType.Q4_1)
    assert any(f"{kind.name} expanded to dense" in note for note in weights.notes) == expanded
    assert_same_logits(path, model)


def test_resident_bytes(tmp_path):
    """The native kernels hold no more than the file does."""
    path = tmp_path / "model.gguf"
    write_gguf(path, quantized_folders.dense_folder(tmp_path / "dense", "llama3", **BIG))
    weights = load_model(EngineConfig(path, dtype="bf16")).weights
    if weights.kernels != ("native",):
        pytest.skip("no compiler: weights are expanded")
    assert weights.num_bytes <= 1.05 * weights.file_bytes


def test_a_mixture_as_q4_k_m(tmp_path):
    """Types that differ within one merged product stay apart."""
    kinds = {"attn_v": GGMLType.Q6_K, "ffn_down": GGMLType.Q6_K, "token_embd": GGMLType.Q6_K, "ffn_up": GGMLType.Q8_0}
    model = quantized_folders.dense_folder(tmp_path / "dense", **BIG)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, lambda name: kinds.get(name.split(".")[-2], GGMLType.Q4_K))
    assert_same_logits(path, model)
    engine = Engine.load(EngineConfig(path, num_blocks=20))
    assert engine.numerics_class.weights == "int4-g32-asym+int8-g16+int8-g32"
    for part in ("weights int4-g32-asym+int8-g16", "MiB in files", "embedding Q6_K, rows expanded as"):
        assert part in start_line(engine)
    assert engine.model_identity == model_identity(path)


def test_every_type_that_gguf_expands(tmp_path):
    """One layer, drawn bytes: what is expanded is what the package says."""
    from baton.engine.core.gguf_file import GGUFFile
    from baton.engine.weights.formats.gguf import GGUFFormat

    path = tmp_path / "types.gguf"
    kinds = [kind for kind in quants._type_traits if kind not in READERS and kind != GGMLType.BF16]
    writer = gguf.GGUFWriter(path, "qwen2")
    generator = np.random.default_rng(1)
    for index, kind in enumerate(kinds):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = generator.integers(0, 0x38, (8, 512 // block * size), dtype=np.uint8)  # no fp16 above 1/2
        writer.add_tensor(f"blk.{index}.ffn_up.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    source = GGUFFormat(file, torch.float32, 1, 1)
    for index, kind in enumerate(kinds):
        found = source.linear(f"model.layers.{index}.mlp.up_proj", 8, 512).dequantize()
        expected = quants.dequantize(np.asarray(file.tensors[f"blk.{index}.ffn_up.weight"].data), kind)
        assert torch.equal(found, torch.from_numpy(expected)), kind
        assert f"{kind.name} expanded to dense" in source.notes


@pytest.fixture
def path(tmp_path):
    write_gguf(tmp_path / "model.gguf", quantized_folders.dense_folder(tmp_path / "dense"))
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("keep", [0, 3, 20, 300, -1000])
def test_a_truncated_file_is_named(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="model.gguf: truncated or not a GGUF file") as error:
        load_model(EngineConfig(path))
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        load_model(EngineConfig(tmp_path / "model.gguf"))


def test_unknown_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba' is not supported"):
        load_model(EngineConfig(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("name", "place", "value", "told"),
    [
        ("blk.1.ffn_down.weight", (3, slice(2)), (0, 0x7E), "scales"),  # a NaN of fp16
        ("blk.1.ffn_norm.weight", -1, float("nan"), "values"),
    ],
)
def test_what_is_not_finite(path, name, place, value, told):
    reader = gguf.GGUFReader(path, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == name).data[place] = value
    reader.data.flush()
    with pytest.raises(ModelError, match=f"model.gguf: tensor {name} holds {told} that are NaN"):
        load_model(EngineConfig(path))


def test_a_rounding_is_refused(path):
    with pytest.raises(ValueError, match="GGUF file and has its own"):
        load_model(EngineConfig(path, quantization="int8"))
