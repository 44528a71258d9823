"""Families whose layers calibration does not compute: rounded as stored, by the schemes that need no calibration."""

import pytest

from baton.engine.core.config import EngineConfig
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.quantization.core.errors import QuantizeError
from baton.quantization.quantize import plan, quantize
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders.families import make_folder, random_ids

SIZES = dict(hidden_size=64, intermediate_size=96)
EXPERTS = dict(moe_intermediate_size=96)
LATENT = EXPERTS | dict(q_lora_rank=32, v_head_dim=16, n_shared_experts=1)
IDS = random_ids(40, 3)
RANKS = dict(mamba_dt_rank=32)
# Of the logits' power; 2 where one has nothing to do with the other. Rounding sends some rows to other experts.
WORST = {"int8": 0.02, "int8-weight-only": 0.02, "int4-rtn": 0.4, "fp8": 0.08}
# Where layers keep a state, what rounding did to a token is in all behind it.
WITH_STATE = WORST | {"int4-rtn": 0.8, "fp8": 0.16}


def logits(folder, quantization="auto"):
    return ManualBatch(load_model(EngineConfig(folder, quantization=quantization))).step({"a": IDS})["a"]


@pytest.mark.parametrize("scheme", WORST)
@pytest.mark.parametrize("name", [
    "gemma3", "phi4-mini", "starcoder2", "qwen2-moe", "qwen3-moe", "deepseek-v3", "mamba2", "granite-4", "falcon-h1",
    "nemotron-h", "nemotron-3", "qwen3-next", "qwen3.5", "jamba", "bamba",
])  # fmt: skip
def test_rounded_as_stored(tmp_path, name, scheme):
    more = {
        "qwen2-moe": EXPERTS | dict(shared_expert_intermediate_size=64),
        "qwen3-moe": EXPERTS,
        "deepseek-v3": LATENT,
        "nemotron-3": EXPERTS | dict(moe_shared_expert_intermediate_size=96),
        "qwen3-next": EXPERTS | dict(shared_expert_intermediate_size=64),
        "granite-4": dict(shared_intermediate_size=96),
        "jamba": RANKS,
    }.get(name, {})
    make_folder(tmp_path / "float", name, **SIZES, **more)
    quantize(plan(tmp_path / "float", scheme), tmp_path / "made")
    expected = logits(tmp_path / "float")
    worst = WORST if read_spec(tmp_path / "float").state is None else WITH_STATE
    made = [logits(tmp_path / "made")]
    if scheme.startswith("int8"):
        made.append(logits(tmp_path / "float", scheme))  # rounded as it loads
    for found in made:
        error = (found - expected).square().mean() / expected.square().mean()
        assert 0 < error < worst[scheme]
    sizes = [(tmp_path / part / "model.safetensors").stat().st_size for part in ("float", "made")]
    assert sizes[1] < 0.7 * sizes[0]


@pytest.mark.parametrize(
    ("name", "scheme", "message"),
    [
        ("gemma3", "int4-gptq", "int4-gptq is calibrated through Llama's layers, not norms elsewhere; take int8, "),
        ("mixtral", "int4-awq", "int4-awq is calibrated through Llama's layers, not mixture of experts; take int8, "),
        ("granite-moe", "int8", "experts in one tensor are not quantized; serve it with --quantization"),
    ],
)
def test_what_is_refused(tmp_path, name, scheme, message):
    make_folder(tmp_path, name, **SIZES)
    with pytest.raises(QuantizeError) as error:
        plan(tmp_path, scheme)
    assert message in str(error.value) and "\n" not in str(error.value)
