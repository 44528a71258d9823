"""Phi-3, Phi-3.5 and Phi-4: Llama's layers with q, k, v in one tensor and gate, up in another; Phi-4-mini rotates a
part of each head."""

from baton.engine.core.model_spec import ModelSpec, TensorNames
from baton.engine.families.config import Config

NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
LONGROPE = {"su": "longrope", "yarn": "longrope"}  # as its first folders called it


def phi3(config: Config) -> ModelSpec:
    layers = config.same_layers(config.window())
    rope = config.rope(4096, renamed=LONGROPE)
    return config.spec("phi3", [rope], layers, norm=config.norm(1e-5), names=NAMES)
