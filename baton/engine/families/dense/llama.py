"""Llama 2 to 3.3 and others of its architecture (Falcon 3), Mistral, Ministral, SmolLM3."""

from dataclasses import replace

from baton.engine.core.model_spec import ModelSpec
from baton.engine.families.config import Config


def llama(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    return config.spec("llama", [config.rope(2048)], qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


def mistral(config: Config) -> ModelSpec:
    return config.spec("mistral", [config.rope(131072)], config.same_layers(config.window(4096)), num_kv_heads=8)


def ministral(config: Config) -> ModelSpec:
    has_window = config.values.get("sliding_window", 4096) is not None
    layers = config.alternating(lambda layer: has_window)
    return config.spec("ministral", [config.rope(131072)], layers, num_kv_heads=8)


def smollm3(config: Config) -> ModelSpec:
    """Return a spec in which every fourth layer has no rope; only those layers have windows, if there are any."""
    interval = config.count("no_rope_layer_interval", 4)
    default = [int((layer + 1) % interval != 0) for layer in range(config.num_layers)]
    turns = config.values.get("no_rope_layers") or default
    if len(turns) != config.num_layers:
        raise ValueError(f"no_rope_layers names {len(turns)} layers of {config.num_layers}")
    layers = config.same_layers()
    if config.flag("use_sliding_window") and config.window() is not None:
        layers = config.alternating(lambda layer: not turns[layer])
    layers = tuple(layer if turn else replace(layer, rope=None) for layer, turn in zip(layers, turns, strict=True))
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    return config.spec(
        "smollm3", [config.rope(32768, theta=2e6)], layers, num_kv_heads=4, tied=True, qkv_bias=bias, output_bias=bias,
        mlp_bias=mlp_bias,
    )  # fmt: skip
