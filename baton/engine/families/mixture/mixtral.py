"""Mixtral: Mistral's layers with experts."""

from dataclasses import replace

from baton.engine.core.model_spec import ExpertsSpec, ModelSpec
from baton.engine.families.config import Config

NAMES = tuple(f"block_sparse_moe.{name}" for name in ("gate", "experts.{}.w1", "experts.{}.w3", "experts.{}.w2"))


def mixtral(config: Config) -> ModelSpec:
    experts = ExpertsSpec(
        num_experts=config.count("num_local_experts", 8),
        num_chosen=config.count("num_experts_per_tok", 2),
        intermediate_size=config.count("intermediate_size"),
        names=NAMES,
    )
    layers = tuple(replace(layer, experts=experts) for layer in config.same_layers(config.window()))
    rope = config.rope(131072, theta=1e6)
    return config.spec("mixtral", [rope], layers, num_kv_heads=8, norm=config.norm(1e-5))
