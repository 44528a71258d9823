"""The plan's bytes are the engine's own."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

from baton.engine import native
from baton.engine.core.config import EngineConfig, resolve
from baton.engine.core.device import PROCESS_BYTES
from baton.engine.core.device import find_device as find_torch_device
from baton.engine.core.model_errors import ModelError
from baton.engine.kv.pool import CPU as CPU_DEVICE
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.planning.devices import GPUS, Device
from baton.planning.memory import held_weights, linear_shapes, plan_memory
from kvtransfer.layout import KVLayout
from tests.support.model_folders.families import make_folder
from tests.support.native.ranks_in_threads import collectives_of
from tests.support.process import ROOT

MODEL = Path(__file__).resolve().parents[2] / "demo" / "target"
SHAPES = ROOT / "baton" / "planning" / "shapes"
CPU = Device("test", "cpu", 8 << 30, 1e10, {"bf16": 1e11}, 1e9, 2)


@pytest.mark.parametrize("form", ["none", "int8", "int4-g32"])
def test_weights_are_those_that_the_engine_counts(form):
    spec = read_spec(MODEL)
    config = resolve(EngineConfig(model=MODEL, quantization=form, dtype="bf16", num_blocks=64), spec)
    model = load_model(config, find_torch_device("cpu"))
    if "bf16" not in model.weights.form and form == "none":
        pytest.skip(f"this machine computes in {model.weights.form}")
    assert held_weights(spec, form, on_cpu=True).kernel_bytes == model.weights.num_bytes


@pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
@pytest.mark.parametrize("form", ["none", "int8", "int4-g32"])
def test_weights_of_latent_attention_are_nearly_those_that_the_engine_counts(form, tmp_path):
    """Of rounded weights the absorbed ones stay floats: in int4 a fifth of such a model was not planned."""
    latent = dict(kv_lora_rank=64, q_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64)
    sizes = dict(hidden_size=256, intermediate_size=512, moe_intermediate_size=64)
    make_folder(tmp_path, "deepseek-v2", dtype=torch.bfloat16, **latent, **sizes)
    config = EngineConfig(model=tmp_path, quantization=form, dtype="bf16", num_blocks=64)
    spec = read_spec(tmp_path)
    model = load_model(resolve(config, spec), CPU_DEVICE)
    routers = sum(4 * each.experts.num_experts * spec.hidden_size for each in spec.layers if each.experts)
    planned = held_weights(spec, form, on_cpu=True).kernel_bytes
    assert planned == pytest.approx(model.weights.num_bytes + routers, rel=0.02)


@pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
@pytest.mark.parametrize("form", ["none", "int8", "int4-g32"])
def test_weights_of_a_rank_are_those_that_it_counts(form):
    spec, degree = read_spec(MODEL), 2
    config = resolve(EngineConfig(model=MODEL, quantization=form, dtype="bf16", num_blocks=64), spec)
    model = load_model(config, CPU_DEVICE, collectives_of(degree)[1])
    if "bf16" not in model.weights.form and form == "none":
        pytest.skip(f"this machine computes in {model.weights.form}")
    assert held_weights(spec, form, on_cpu=True, degree=degree).kernel_bytes == model.weights.num_bytes


@pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
@pytest.mark.parametrize(
    "sizes",
    [
        dict(hidden_size=192, num_attention_heads=3, num_key_value_heads=3, intermediate_size=512),
        dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96),
        dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80),
        dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, head_dim=16),
    ],
    ids=["3 heads", "all fit", "80 wide", "48 hidden"],
)
def test_what_a_worker_refuses_is_not_planned(tmp_path, sizes):
    """A degree that does not divide the heads, and groups that do not divide the inputs, were printed to be started."""
    make_folder(tmp_path, "llama3", dtype=torch.bfloat16, **sizes)
    spec = read_spec(tmp_path)
    for form, degree in itertools.product(("none", "int8", "int4-g32"), (1, 2, 4)):
        config = resolve(EngineConfig(model=tmp_path, quantization=form, dtype="bf16", num_blocks=64), spec)
        collectives = collectives_of(degree)[0] if degree > 1 else None
        refused = refusal(load_model, config, CPU_DEVICE, collectives)
        assert refusal(held_weights, spec, form, True, degree) == refused, (form, degree)


def refusal(call, *arguments) -> str:
    """Return the end of the line by which a call refuses a model; "" if it does not."""
    try:
        call(*arguments)
    except ModelError as error:
        return str(error).rpartition(": ")[2]
    return ""


def test_a_model_of_70b_as_ranks():
    """The table of docs/parallel.md: nothing is allocated for it."""
    spec, page = read_spec(SHAPES / "llama-3.1-70b"), (ROOT / "docs" / "parallel.md").read_text()
    device = Device("test", "cpu", 1 << 40, 1e10, {"bf16": 1e11}, 1e9, 2)
    for degree in (1, 2, 4, 8):
        config = EngineConfig(
            model=spec.folder,
            dtype="bf16",
            kv_dtype="bf16",
            num_blocks=4096,
            max_model_len=8192,
            tensor_parallel=degree,
        )
        plan = plan_memory(spec, device, config, "int4-g128")
        assert plan.kv_bytes == 4096 * 32 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2
        cells = (degree, plan.kernel_bytes, plan.other_weight_bytes, plan.kv_bytes)
        assert f"| {' | '.join(f'{cell:,}' for cell in cells)} |" in page, cells


def test_a_pool_is_as_large_as_the_engine_makes_it():
    spec = read_spec(MODEL)
    config = resolve(EngineConfig(model=MODEL, dtype="bf16", kv_dtype="int8", num_blocks=77), spec)
    plan = plan_memory(spec, CPU, config, "none")
    assert plan.kv_bytes == 77 * KVLayout((spec.kv_group("int8", config.block_size),)).block_bytes
    assert plan.total_bytes == plan.weight_bytes + plan.kv_bytes + plan.step_bytes + PROCESS_BYTES


@pytest.mark.parametrize("name", sorted(path.name for path in SHAPES.iterdir()))
def test_every_shape_is_one_of_a_family_that_is_served(name):
    spec = read_spec(SHAPES / name)
    listed = sum(count * out * inputs for (out, inputs), count in linear_shapes(spec).items())
    routers = sum(layer.experts.num_experts * spec.hidden_size for layer in spec.layers if layer.experts)
    assert listed + routers == spec.num_layer_weights()


@pytest.mark.parametrize("name", GPUS)
def test_a_plan_never_takes_more_than_the_device_has(name):
    spec, device = read_spec(SHAPES / "llama-3.1-8b"), GPUS[name]
    config = EngineConfig(
        model=spec.folder, kv_dtype="bf16", block_size=64, max_model_len=8192, max_num_batched_tokens=2048
    )
    for form in ("none", "int8", "int4-g32"):
        try:
            plan = plan_memory(spec, device, config, form)
        except ValueError as error:
            assert "out of GPU memory" in str(error)
            continue
        assert plan.total_bytes <= device.memory_bytes
        assert plan.num_kv_tokens >= 2048


def test_a_gpu_has_the_memory_that_its_driver_reports():
    """Not that of its name: an L40S of 48 GB reports 46,068 MiB, of which torch gets less."""
    reported_mib = {"H100": 81559, "A100": 81920, "L40S": 46068, "RTX4090": 24564}
    for name, most_mib in reported_mib.items():
        assert 0.95 * most_mib < GPUS[name].memory_bytes / 2**20 < most_mib


def test_a_model_that_does_not_fit_is_told():
    spec = read_spec(SHAPES / "llama-3.1-70b")
    config = EngineConfig(
        model=spec.folder, kv_dtype="bf16", block_size=64, max_model_len=8192, max_num_batched_tokens=2048
    )
    with pytest.raises(ValueError, match="out of GPU memory"):
        plan_memory(spec, GPUS["H100"], config, "none")
    small = dataclasses.replace(CPU, memory_bytes=1 << 20)
    with pytest.raises(ValueError, match="a worker takes [0-9,]+ bytes, this machine has 1,048,576"):
        plan_memory(spec, small, dataclasses.replace(config, num_blocks=8), "int8")


def test_shapes_are_plain_configs():
    for path in SHAPES.glob("*/config.json"):
        assert json.loads(path.read_text())["architectures"]
