"""Grouped products against those of each weight alone, bit for bit, and the experts of a mixture in them: compiled on a
GPU, in Triton's interpreter on a CPU."""

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels
from baton.engine.core.config import EngineConfig
from baton.engine.layers.activation import clamped_swiglu
from baton.engine.models import loader
from baton.engine.weights.formats.placed import placed
from baton.engine.weights.forms import DenseWeight
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders.families import make_folder, random_ids
from tests.support.model_folders.weight_forms import FORMS

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = pytest.mark.skipif(
    bool(kernels.unavailable(DEVICE.type)), reason=kernels.unavailable(DEVICE.type) or "there"
)
HELD = [name for name in FORMS if "order" not in name and "outliers" not in name and "g16" not in name]


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("num_owners", [1, 5, 40])
def test_places_are_sorted_and_cut_into_tiles(num_owners, tile, monkeypatch):
    """Those of an owner stay in their order; some owners have none."""
    from baton.engine.layers import grouped

    monkeypatch.setattr(grouped, "tile_of", lambda rows, exact: tile)
    monkeypatch.setattr(grouped, "SORT_BLOCK", 128)
    torch.manual_seed(num_owners)
    for num_places in (1, 63, 200):
        owners = torch.randint(num_owners, (num_places,)) // 2 * 2
        places = grouped.sort_places(owners.to(DEVICE), num_owners, True)
        assert places.order.tolist() == owners.argsort(stable=True).tolist()
        found = [tuple(each) for each in places.tiles.t().tolist() if each[0] >= 0]
        wanted, first = [], 0
        for owner, count in enumerate(owners.bincount(minlength=num_owners).tolist()):
            begins = range(first, first + count, tile)
            wanted += [(owner, begin, min(begin + tile, first + count)) for begin in begins]
            first += count
        assert found == wanted and places.tiles[0, len(found) :].tolist() == [-1] * (places.tiles.shape[1] - len(found))


# Some forms in sums of segments, and in the leaves of a tree, too. One of each kind of weight and scales is run always.
OFTEN = ("bf16", "int8-g32", "int8-dynamic", "int4-g32-asym", "fp8-32x32-dynamic-block")
PRODUCTS = [
    *((form, 256, 1, True) for form in OFTEN),
    *(pytest.param(form, 256, 1, True, marks=pytest.mark.long) for form in HELD if form not in OFTEN),
    ("bf16", 1024, 1, True),
    ("bf16", 1024, 8, True),
    pytest.param("int4-g32-asym", 1024, 8, True, marks=pytest.mark.long),
    ("bf16", 256, 1, False),
    pytest.param("int4-g32", 256, 1, False, marks=pytest.mark.long),
    pytest.param("int8-dynamic", 256, 1, False, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("form", "num_in", "leaves", "exact"), PRODUCTS)
def test_a_row_has_the_bits_that_its_weight_alone_gives(form, num_in, leaves, exact):
    """And, where they are exact, those that it has among fewer rows."""
    from baton.engine.layers.grouped import GroupedLinear, sort_places
    from baton.engine.layers.linear.triton import GpuLinear

    torch.manual_seed(1)
    shape, num_owners, num_places = (70, num_in), 3, 12
    make = FORMS.get(form, lambda shape: DenseWeight((torch.randn(shape) / 32).bfloat16()))
    x = torch.randn(num_places // 2, num_in).bfloat16().to(DEVICE)
    owners = torch.randint(num_owners, (num_places,)).to(DEVICE)
    linears = [
        GpuLinear(placed(make(shape), DEVICE), torch.randn(shape[0]).to(DEVICE), torch.bfloat16, exact, leaves)
        for _ in range(num_owners)
    ]
    assert GroupedLinear.unfit(linears) == ""
    places = sort_places(owners, num_owners, exact)
    alone = [linear.paths[f"tile{places.tile}"](x, None) for linear in linears]
    together = GroupedLinear(linears)
    y = together(x, places, 2, scatters=True)
    for place, owner in enumerate(owners.tolist()):
        assert torch.equal(y[place], alone[owner][place // 2]), (place, owner)
    order = places.order.long()
    assert torch.equal(together(x.repeat_interleave(2, 0)[order], places), y[order])
    assert torch.equal(linears[1].paths[f"tile{places.tile}"](x, None), alone[1])  # over the memory of all
    few = sort_places(owners[6:8].contiguous(), num_owners, exact)
    if exact:
        assert torch.equal(together(x[3:4], few, 2, scatters=True), y[6:8])


def test_parts_of_a_row_meet_a_weight_each():
    from baton.engine.layers.grouped import GroupedLinear
    from baton.engine.layers.linear.triton import GpuLinear

    torch.manual_seed(4)
    weights = [DenseWeight(torch.randn(40, 72).bfloat16().to(DEVICE)) for _ in range(3)]
    linears = [GpuLinear(weight, None, torch.bfloat16, True) for weight in weights]
    x = torch.randn(70, 3, 72).bfloat16().to(DEVICE)
    alone = torch.stack([linear(x[:, index].contiguous()) for index, linear in enumerate(linears)], dim=1)
    together = GroupedLinear(linears)
    assert torch.equal(together.each(x), alone) and torch.equal(together.each(x[66:68].contiguous()), alone[66:68])


def test_what_cannot_be_grouped_says_why():
    from baton.engine.layers.grouped import GroupedLinear
    from baton.engine.layers.linear.triton import GpuLinear

    torch.manual_seed(2)
    made = {
        name: GpuLinear(placed(FORMS[name]((32, 64)), DEVICE), None, torch.bfloat16, True)
        for name in ("int4-g32", "int8-g32", "int8-outliers-dynamic")
    }
    assert GroupedLinear.unfit([made["int4-g32"], made["int8-g32"]]) == "weights differ in form"
    assert "outliers" in GroupedLinear.unfit([made["int8-outliers-dynamic"]] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clamped_swiglu(dtype):
    from baton.engine.kernels.quantize import Rounding, round_rows
    from baton.engine.kernels.rows import swiglu, swiglu_rounded

    gate_up = (torch.randn(3, 2 * 300, generator=torch.Generator().manual_seed(3)) * 6).to(dtype)
    found = swiglu(gate_up.to(DEVICE), (1.702, 7.0))
    wanted = clamped_swiglu(gate_up.double(), 1.702, 7.0)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=tolerance)
    rounding = Rounding(torch.int8)
    rounded = swiglu_rounded(gate_up.to(DEVICE), rounding, (1.702, 7.0))
    assert torch.equal(rounded.values, round_rows(found, rounding, None).values)


CASES = [
    ("qwen3-moe", "int4-g32", "triton"),
    ("gpt-oss", "none", "torch"),
    ("deepseek-v3", "none", "torch"),
    pytest.param("mixtral", "none", "triton", marks=pytest.mark.long),
    pytest.param("qwen2-moe", "none", "triton", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("family", "quantization", "layers"), CASES)
def test_models_equal_torch_expert_by_expert(tmp_path, family, quantization, layers, on_gpu_kernels):
    """Near to what torch computes expert by expert, with one row's bits whatever shares its step; and fit for a
    graph."""
    sizes = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=64) if quantization != "none" else {}
    make_folder(tmp_path, family, num_hidden_layers=2, **sizes)
    config = EngineConfig(tmp_path, attention="triton", quantization=quantization, dtype="fp32")
    model = loader.load_model(config, DEVICE)
    assert model.layers_name == layers and model.capturable
    found = steps_of(model)
    for layer in model.layers:
        if layer.experts is not None:
            assert layer.experts.grouped is not None
            layer.experts.grouped = None
        if model.spec.latent is not None:
            for heads in (layer.qkv._keys, layer.output._values):
                assert heads._grouped is not None
                heads._grouped = None
    assert not model.capturable
    torch.testing.assert_close(found, steps_of(model), rtol=1e-4, atol=1e-4)


def steps_of(model) -> torch.Tensor:
    hand = ManualBatch(model)
    with DEVICE:
        steps = [hand.step({"a": random_ids(9, 1)}), hand.step({"b": random_ids(5, 3), "a": [9]})]
    return torch.cat([rows.cpu() for step in steps for rows in step.values()])


def test_experts_of_several_forms_are_computed_one_by_one(tmp_path, on_gpu_kernels, monkeypatch):
    """And a line of the start says so."""
    from baton.engine.layers.grouped import GroupedLinear

    make_folder(tmp_path, "mixtral", num_hidden_layers=1)
    monkeypatch.setattr(GroupedLinear, "unfit", staticmethod(lambda linears: "weights differ in form"))
    model = loader.load_model(replace(EngineConfig(tmp_path, attention="triton"), dtype="fp32"), DEVICE)
    assert model.reasons["layers"]["grouped experts"] == "weights differ in form" and not model.capturable
