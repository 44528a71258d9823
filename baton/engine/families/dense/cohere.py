"""Command R, R+ and R7B, Aya: attention and MLP side by side after one layer norm, scaled logits."""

from baton.engine.core.model_spec import ModelSpec, NormSpec, TensorNames
from baton.engine.families.config import Config

NAMES = TensorNames(before_mlp="")


def cohere(config: Config) -> ModelSpec:
    qk_norm = "heads" if config.flag("use_qk_norm") else ""
    return config.spec("cohere", [_rope(config, 5e5)], qk_norm=qk_norm, **_common(config))


def cohere2(config: Config) -> ModelSpec:
    """Return a spec of three layers with window and rope, then one with neither, repeated."""
    pattern = config.count("sliding_window_pattern", 4)
    layers = config.alternating(lambda layer: (layer + 1) % pattern != 0, full=None, sliding=0)
    return config.spec("cohere2", [_rope(config, 1e4)], layers, **_common(config))


def _rope(config: Config, theta: float):
    return config.rope(8192, theta=theta, interleaved=True)


def _common(config: Config) -> dict:
    bias = config.flag("attention_bias")
    return {
        "norm": NormSpec(config.number("layer_norm_eps", 1e-5), "layer"),
        "names": NAMES,
        "parallel": True,
        "logit_scale": config.number("logit_scale", 0.0625),
        "tied": True,
        "qkv_bias": bias,
        "output_bias": bias,
    }
