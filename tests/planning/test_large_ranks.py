"""A model of 70B in int4, loaded as ranks by the engine's own loader from files that are holes: the plan's bytes are
those that each rank has, and none of them is there."""

import gc
import json
from pathlib import Path

import pytest
import torch

from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.kv.pool import CPU
from baton.engine.layers.norm import RMSNorm
from baton.engine.models.decoder import Model
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.planning.devices import Device
from baton.planning.memory import plan_memory
from tests.planning.sparse_folder import read_on_meta, write_int4_llama
from tests.support.native.ranks_in_threads import collectives_of

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
SHAPE = Path(__file__).resolve().parents[2] / "baton" / "planning" / "shapes" / "llama-3.1-70b"
MACHINE = Device("test", "cpu", 1 << 40, 1e10, {"bf16": 1e11}, 1e9, 2)
MAX_REAL_BYTES = 64 << 20  # rotary tables of the context, and shared memory of the ranks: no weight


def norm_bytes(model: Model) -> int:
    norms = [model.norm, *(norm for layer in model.layers for norm in (layer.input_norm, layer.mlp_norm))]
    assert all(isinstance(norm, RMSNorm) for norm in norms)
    return sum(norm.weight.numel() * 2 for norm in norms)


def real_bytes() -> int:
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and not each.is_meta]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.mark.parametrize(
    ("num_layers", "degree", "ranks"),
    [(8, 2, [1]), *(pytest.param(80, *each, marks=pytest.mark.long) for each in [(2, [1]), (2, [0]), (8, [0, 7])])],
)
def test_a_rank_of_70b_has_the_bytes_of_the_plan(tmp_path, monkeypatch, num_layers, degree, ranks):
    """Of a tenth of its layers; in `make test-long` of all."""
    config = json.loads((SHAPE / "config.json").read_text())
    files = write_int4_llama(config | {"num_hidden_layers": num_layers}, tmp_path)
    assert sum(file.stat().st_size for file in files) > 36e9 * num_layers / 80
    config = EngineConfig(
        model=tmp_path, dtype="bf16", kv_dtype="bf16", num_blocks=4096, max_model_len=8192, tensor_parallel=degree
    )
    plan = plan_memory(read_spec(tmp_path), MACHINE, config, "int4-g128")
    read_on_meta(monkeypatch)
    before, ends = real_bytes(), collectives_of(degree)
    for rank in ranks:
        model = load_model(config, CPU, ends[rank])
        assert model.weights.form == "int4-g128-asym+int8"
        assert model.weights.num_bytes == plan.kernel_bytes
        table = model.embedding._table.weight
        assert table.is_meta and table.nbytes + norm_bytes(model) == plan.other_weight_bytes
        assert real_bytes() - before < MAX_REAL_BYTES
    layout = model.kv_layout(config.kv_dtype, config.block_size)
    assert config.num_blocks * layout.block_bytes == plan.kv_bytes
    assert sum(file.stat().st_blocks * 512 for file in files) < 1 << 20  # what was a hole still is
