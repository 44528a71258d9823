"""Qwen1.5-MoE and Qwen2-MoE, with an expert that every token visits, and Qwen3-MoE."""

from dataclasses import replace

from baton.engine.core.model_spec import ExpertsSpec, LayerSpec, ModelSpec
from baton.engine.families.config import Config

NAMES = ("mlp.gate", *(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")))
SHARED = ("mlp.shared_expert_gate", *(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")))


def qwen2_moe(config: Config) -> ModelSpec:
    experts = ExpertsSpec(
        num_experts=config.count("num_experts", 60),
        num_chosen=config.count("num_experts_per_tok", 4),
        intermediate_size=config.count("moe_intermediate_size", 1408),
        names=NAMES,
        renormalized=config.flag("norm_topk_prob"),
        shared_size=config.count("shared_expert_intermediate_size", 5632),
        shared_names=SHARED,
    )
    first = config.values.get("max_window_layers", 28)
    layers = config.same_layers()
    if config.flag("use_sliding_window") and config.window(4096) is not None:
        layers = config.alternating(lambda layer: layer % 2 == 0 and layer < first)
    return config.spec(
        "qwen2_moe", [config.rope(32768)], sparse(config, layers, experts), num_kv_heads=16,
        qkv_bias=config.flag("qkv_bias", True),
    )  # fmt: skip


def qwen3_moe(config: Config) -> ModelSpec:
    experts = ExpertsSpec(
        num_experts=config.count("num_experts", config.values.get("num_local_experts", 128)),
        num_chosen=config.count("num_experts_per_tok", 8),
        intermediate_size=config.count("moe_intermediate_size", 768),
        names=NAMES,
        renormalized=config.flag("norm_topk_prob"),
    )
    layers = config.same_layers(config.window(4096) if config.flag("use_sliding_window") else None)
    bias = config.flag("attention_bias")
    return config.spec(
        "qwen3_moe", [config.rope(32768)], sparse(config, layers, experts), num_kv_heads=4, qk_norm="head",
        qkv_bias=bias, output_bias=bias,
    )  # fmt: skip


def sparse(config: Config, layers: tuple[LayerSpec, ...], experts: ExpertsSpec) -> tuple[LayerSpec, ...]:
    """Return layers with experts in every `decoder_sparse_step`-th one, except those of `mlp_only_layers`."""
    step, dense = config.count("decoder_sparse_step", 1), config.values.get("mlp_only_layers") or ()
    return tuple(
        layer if index in dense or (index + 1) % step else replace(layer, experts=experts)
        for index, layer in enumerate(layers)
    )
