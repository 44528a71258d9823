"""What a plan holds of a folder that is quantized already, or of a .gguf file, beside what an engine takes for it."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
from gguf import GGMLQuantizationType as GGMLType

from baton.cli.main import main
from baton.engine import kernels, native
from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.engine.kv.pool import CPU
from baton.engine.layers.linear.gpu import GpuChoice
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.engine.weights.formats.placed import placed
from baton.engine.weights.tensors import Weights
from baton.planning.devices import GPUS, Device
from baton.planning.efficiency import EXTRAPOLATED, shipped
from baton.planning.memory import held_weights
from baton.planning.step_time import StepTimes
from baton.planning.stored_form import StoredForm, WeightOnGpu, norm_bytes
from baton.planning.virtual_engine import StepPieces
from tests.support.gguf.model_files import write_gguf
from tests.support.model_folders import quantized_folders
from tests.support.model_folders.weight_forms import FORMS
from tests.support.models import make_model
from tests.support.native.ranks_in_threads import collectives_of

MACHINE = Device("test", "cpu", 8 << 30, 1e10, {"bf16": 1e11, "int8": 1e11}, 1e9, 2)
BF16 = torch.bfloat16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LEFT_OUT = ("model.layers.1.mlp.down_proj",)
BIG = dict(hidden_size=256, intermediate_size=512)  # what blocks of 256 divide
PUBLISHED = {
    "gptq": ("gptq", {}),
    "gptq asymmetric, act-order": ("gptq", dict(sym=False, act_order=True)),
    "gptq int8": ("gptq", dict(bits=8)),
    "gptq with its head": ("gptq", dict(head=True, lm_head=True)),
    "gptq but for one module": ("gptq", dict(skip=LEFT_OUT, dynamic={r"-:.*layers\.1\.mlp\.down_proj": {}})),
    "awq": ("awq", {}),
    "fp8 in blocks": ("fp8", dict(block=(32, 32))),
    "fp8 by row": ("fp8", dict(spread="row")),
    "fp8 static": ("fp8", dict(spread="tensor", static=True)),
}
SCHEMES = ("int8", "int8-weight-only", "int4-rtn", "int4-gptq", "int8-outlier", "fp8")


def engine_bytes(folder) -> tuple[int, int, str]:
    """Return what an engine has of linear weights and of its embedding, and the forms."""
    model = Engine.load(EngineConfig(folder, dtype="bf16", num_blocks=64, max_model_len=128)).runner.model
    table = getattr(model.embedding, "weight", None)
    return model.weights.num_bytes, 0 if table is None else table.nbytes, model.weights.form


def check(folder) -> StoredForm:
    spec = read_spec(folder)
    form = StoredForm(spec, MACHINE)
    kernels, table, name = engine_bytes(folder)
    assert str(form) == name
    assert form.held().kernel_bytes == kernels
    assert form.held().other_bytes == table + norm_bytes(spec)
    return form


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_worker_has_the_bytes_of_the_plan(name, tmp_path):
    writer, options = PUBLISHED[name]
    quantized_folders.dense_folder(tmp_path, *(["qwen2"] if writer == "awq" else []), num_attention_heads=4)
    getattr(quantized_folders, f"write_{writer}")(tmp_path, **options)
    check(tmp_path)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_baton_quantizes(scheme, tmp_path):
    make_model(tmp_path / "float")
    words = ["--model", str(tmp_path / "float"), "--out", str(tmp_path / "model"), "--scheme", scheme]
    group = ["--group", "32"] if scheme.startswith("int4") else []
    assert main(["quantize", *words, *group]) == 0
    form = check(tmp_path / "model").held()
    assert form.form == {"int4": "int4-g32", "int8": "int8", "fp8": "fp8"}[scheme.split("-")[0]]


@pytest.mark.parametrize("family", ["llama3", "llama3.2-tied"])
@pytest.mark.parametrize("kind", [GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q6_K])
def test_a_gguf_file(kind, family, tmp_path):
    model = quantized_folders.dense_folder(tmp_path, family, **BIG)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, lambda name: kind)
    check(path)
    spec = read_spec(path)
    table = 0 if spec.tied and kind == GGMLType.F16 else 2 * spec.vocab_size * spec.hidden_size
    assert StoredForm(spec, GPUS["H100"]).held().other_bytes == table + norm_bytes(spec)


@pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
@pytest.mark.parametrize("name", ["gptq asymmetric, act-order", "fp8 in blocks"])
def test_a_rank_has_the_bytes_of_the_plan(name, tmp_path):
    writer, options = PUBLISHED[name]
    quantized_folders.dense_folder(tmp_path, num_attention_heads=4)
    getattr(quantized_folders, f"write_{writer}")(tmp_path, **options)
    form, config = StoredForm(read_spec(tmp_path), MACHINE), EngineConfig(tmp_path, dtype="bf16")
    assert form.held(2).kernel_bytes == load_model(config, CPU, collectives_of(2)[0]).weights.num_bytes
    with pytest.raises(ModelError, match="tensor_parallel 8"):
        held_weights(read_spec(tmp_path), form, on_cpu=True, degree=8)


def test_of_modules_that_are_stored_alike_one_is_read(tmp_path, monkeypatch):
    make_model(tmp_path / "float")
    words = ["--model", str(tmp_path / "float"), "--out", str(tmp_path / "model"), "--scheme", "int8"]
    assert main(["quantize", *words]) == 0
    seen, read = [], Weights.read
    monkeypatch.setattr(Weights, "read", lambda self, name, *rest: seen.append(name) or read(self, name, *rest))
    StoredForm(read_spec(tmp_path / "model"), MACHINE)
    products = [name for name in seen if "_proj.weight" in name]
    assert products and all(name.startswith("model.layers.0.") for name in products)


def test_modules_of_two_groups_are_not_alike_though_their_tensors_are(tmp_path):
    """int8 by rows, whose activations one group rounds and the other does not."""
    quantized_folders.dense_folder(tmp_path)
    weights = dict(num_bits=8, type="int", strategy="channel", symmetric=True)
    rounded = dict(num_bits=8, type="int", strategy="token", dynamic=True)
    groups = {
        "a": dict(targets=["re:.*layers.0.*"], weights=weights),
        "b": dict(targets=["Linear"], weights=weights, input_activations=rounded),
    }
    config = dict(quant_method="compressed-tensors", format="int-quantized", config_groups=groups, ignore=["lm_head"])

    def write(weight):
        return dict(weight=torch.ones_like(weight, dtype=torch.int8), weight_scale=torch.ones(len(weight), 1)), weight

    quantized_folders.rewrite(tmp_path, config, write)
    assert {"int8", "int8-dynamic"} <= {*str(check(tmp_path)).split("+")}


@pytest.mark.skipif(bool(kernels.unavailable(DEVICE.type)), reason=kernels.unavailable(DEVICE.type) or "there")
@pytest.mark.parametrize("name", FORMS)
def test_a_weight_on_a_gpu_has_the_bytes_of_its_kernel(name):
    weight, bias = FORMS[name]((64, 256)), torch.zeros(64, dtype=BF16)
    kernel = GpuChoice("auto", True, BF16, DEVICE)(placed(weight, DEVICE), bias.to(DEVICE))
    assert WeightOnGpu(weight, bias, BF16, True).num_bytes == kernel.num_bytes


def test_a_form_of_which_nothing_was_measured_has_the_speeds_of_one_that_computes_alike(tmp_path):
    quantized_folders.dense_folder(tmp_path)
    quantized_folders.write_fp8(tmp_path, spread="row")
    spec, known = read_spec(tmp_path), shipped("cpu")
    times = StepTimes(spec, MACHINE, known, StoredForm(spec, MACHINE), "bf16")
    bound = times.bound(StepPieces(((1, 100),), 1))
    efficiency = known.of("linear", "none", times.roofs.layer_bytes, 1)
    assert bound.linear_s == pytest.approx(times.roofs.linear_s(1)[0] / efficiency)
    assert known.confidence == EXTRAPOLATED


def test_fp8_is_expanded_where_a_gpu_does_not_multiply_it(tmp_path):
    quantized_folders.dense_folder(tmp_path)
    quantized_folders.write_fp8(tmp_path, spread="row")
    on_h100, on_a100 = (StoredForm(read_spec(tmp_path), GPUS[name]).held() for name in ("H100", "A100"))
    assert on_a100.layer_bytes > 1.5 * on_h100.layer_bytes
    assert (on_h100.computes, on_a100.computes) == ("fp8", "bf16")


@pytest.mark.parametrize(
    ("name", "on_h100", "on_cpu"),
    [("gptq", "fp32", "int8"), ("awq", "fp32", "int8"), ("fp8 by row", "fp8", "fp32")],
)
def test_workers_in_fp32_multiply_so_what_no_form_rounds_their_rows_for(name, on_h100, on_cpu, tmp_path):
    writer, options = PUBLISHED[name]
    quantized_folders.dense_folder(tmp_path, *(["qwen2"] if writer == "awq" else []), num_attention_heads=4)
    getattr(quantized_folders, f"write_{writer}")(tmp_path, **options)
    spec = read_spec(tmp_path)
    assert [StoredForm(spec, device, "fp32").held().computes for device in (GPUS["H100"], MACHINE)] == [on_h100, on_cpu]


def test_a_gguf_file_in_fp32(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, quantized_folders.dense_folder(tmp_path, **BIG), lambda name: GGMLType.Q4_0)
    assert StoredForm(read_spec(path), GPUS["H100"], "fp32").held().computes == "fp32"
