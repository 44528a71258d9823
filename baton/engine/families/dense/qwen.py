"""Qwen2, Qwen2.5 and Qwen3."""

from baton.engine.core.model_spec import LayerSpec, ModelSpec
from baton.engine.families.config import Config


def qwen2(config: Config) -> ModelSpec:
    return config.spec("qwen2", [config.rope(32768)], windowed(config), num_kv_heads=32, qkv_bias=True)


def qwen3(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    return config.spec(
        "qwen3", [config.rope(32768)], windowed(config), num_kv_heads=32, head_dim=128, qk_norm="head", qkv_bias=bias,
        output_bias=bias,
    )  # fmt: skip


def windowed(config: Config) -> tuple[LayerSpec, ...]:
    """Return layers with windows from layer `max_window_layers` on, if the config turns them on."""
    if not config.flag("use_sliding_window") or config.window(4096) is None:
        return config.same_layers()
    first = config.values.get("max_window_layers", 28)
    return config.alternating(lambda layer: layer >= first)
