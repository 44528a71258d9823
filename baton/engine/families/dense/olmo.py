"""OLMo 2 and OLMo 3: norms after attention and MLP, q and k normed over all heads; OLMo 3 has windows."""

from baton.engine.core.model_spec import ModelSpec, TensorNames
from baton.engine.families.config import Config

NAMES = TensorNames(
    before_attention="",
    after_attention="post_attention_layernorm",
    before_mlp="",
    after_mlp="post_feedforward_layernorm",
)


def olmo2(config: Config) -> ModelSpec:
    return config.spec("olmo2", [config.rope(2048)], **_common(config))


def olmo3(config: Config) -> ModelSpec:
    """Return a spec of three layers with a window, then one without, repeated; only the latter's rope is scaled."""
    layers = config.alternating(lambda layer: (layer + 1) % 4 != 0, full=0, sliding=1)
    theta = config.number("rope_theta", 5e5)
    return config.spec("olmo3", config.ropes_by_type(2048, theta, theta), layers, **_common(config))


def _common(config: Config) -> dict:
    bias = config.flag("attention_bias")
    return {"norm": config.norm(1e-5), "names": NAMES, "qk_norm": "all", "qkv_bias": bias, "output_bias": bias}
