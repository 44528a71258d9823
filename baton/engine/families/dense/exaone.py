"""EXAONE 4: norms after attention and MLP, q and k normed by head. If some layers have windows, the others have no
rope."""

from baton.engine.core.model_spec import ModelSpec, TensorNames
from baton.engine.families.config import Config

NAMES = TensorNames(
    before_attention="",
    after_attention="post_attention_layernorm",
    before_mlp="",
    after_mlp="post_feedforward_layernorm",
)


def exaone4(config: Config) -> ModelSpec:
    layers = config.same_layers()
    if config.window(4096) is not None:
        layers = config.alternating(
            lambda layer: (layer + 1) % config.count("sliding_window_pattern", 4) != 0, full=None, sliding=0
        )
    return config.spec(
        "exaone4", [config.rope(2048)], layers, num_kv_heads=32, norm=config.norm(1e-5), names=NAMES, qk_norm="head"
    )
