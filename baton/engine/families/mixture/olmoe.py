"""OLMoE: Llama's layers with experts, q and k normed over all heads."""

from baton.engine.core.model_spec import ExpertsSpec, LayerSpec, ModelSpec
from baton.engine.families.config import Config

NAMES = ("mlp.gate", *(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")))


def olmoe(config: Config) -> ModelSpec:
    config.refuse("clip_qkv")
    experts = ExpertsSpec(
        num_experts=config.count("num_experts", 64),
        num_chosen=config.count("num_experts_per_tok", 8),
        intermediate_size=config.count("intermediate_size"),
        names=NAMES,
        renormalized=config.flag("norm_topk_prob"),
    )
    layers, bias = (LayerSpec(experts=experts),) * config.num_layers, config.flag("attention_bias")
    return config.spec(
        "olmoe", [config.rope(4096)], layers, norm=config.norm(1e-5), qk_norm="all", qkv_bias=bias, output_bias=bias
    )
