"""Decays, `D`, `dt_bias`, norms and the convolution's bias of layers with a state are read as the files have them,
whatever the compute dtype: published ones have them in fp32 (Qwen3.5, Nemotron 3)."""

import pytest
import torch
from safetensors.torch import load_file

from baton.engine.core.config import EngineConfig
from baton.engine.models.loader import load_model
from tests.support.model_folders.families import make_folder

MAMBA2 = {
    "A_log": lambda own: (-own.decay).log(), "D": lambda own: own.skip, "dt_bias": lambda own: own.step_bias,
    "norm.weight": lambda own: own.norm_weight, "conv1d.bias": lambda own: own.conv_bias,
}  # fmt: skip
# Family -> its module in the first layer, and what its tensors are there.
READ = {
    "nemotron-h": ("backbone.layers.0.mixer", MAMBA2),
    "mamba2": ("backbone.layers.0.mixer", MAMBA2),
    "qwen3.5": (
        "model.layers.0.linear_attn",
        {name: MAMBA2[name] for name in ("A_log", "dt_bias", "norm.weight")},
    ),
    "jamba": (
        "model.layers.0.mamba",
        {
            "A_log": lambda own: (-own.decay.t()).log(), "D": MAMBA2["D"], "conv1d.bias": MAMBA2["conv1d.bias"],
            "dt_layernorm.weight": lambda own: own.norms[0], "b_layernorm.weight": lambda own: own.norms[1],
            "c_layernorm.weight": lambda own: own.norms[2],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_parameters_in_fp32_are_not_rounded(tmp_path, name):
    make_folder(tmp_path, name)
    module, read = READ[name]
    stored = load_file(tmp_path / "model.safetensors")
    own = load_model(EngineConfig(tmp_path, threads=1, dtype="bf16")).layers[0].state._parameters
    for suffix, of in read.items():
        wanted = stored[f"{module}.{suffix}"]
        assert not torch.equal(wanted.bfloat16().float(), wanted), suffix
        torch.testing.assert_close(of(own), wanted, rtol=1e-5, atol=1e-5, msg=suffix)
