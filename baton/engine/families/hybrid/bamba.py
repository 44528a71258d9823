"""Bamba: layers of Mamba-2 and some of Llama's attention with rope on half of each head."""

from baton.engine.core.model_spec import LayerSpec, ModelSpec, TensorNames
from baton.engine.families.config import Config
from baton.engine.families.hybrid.mamba2 import ATTENTION, MAMBA, mixed, state_of_mamba

NAMES = TensorNames(
    before_mlp="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    state="mamba",
    renamed=(("model.norm.", "model.final_layernorm."),),
)


def bamba(config: Config) -> ModelSpec:
    places = config.values.get("attn_layer_indices") or []
    if not isinstance(places, list) or not all(place in range(config.num_layers) for place in places):
        raise ValueError(f"attn_layer_indices {places!r:.40} are not layers of {config.num_layers}")
    types = [ATTENTION if index in places else MAMBA for index in range(config.num_layers)]
    layers = mixed(config, LayerSpec(), state_of_mamba(config, config.number("rms_norm_eps", 1e-5)), types)
    bias = config.flag("attention_bias")
    return config.spec(
        "bamba", [config.rope(262144, partial=0.5)], layers, num_kv_heads=8, norm=config.norm(1e-5), names=NAMES,
        qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"),
    )  # fmt: skip
