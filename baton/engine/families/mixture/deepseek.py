"""DeepSeek V2 and V3, and Kimi K2 in their layout: latent attention, grouped and shared experts, dense first layers."""

from dataclasses import replace
from typing import Any

from baton.engine.core.model_spec import (
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    PredictorSpec,
    RopeSpec,
    yarn_scale,
)  # fmt: skip
from baton.engine.families.config import Config, around_predictor, counted

NAMES = ("mlp.gate", *(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")))
# Embedding and head are copies of the model's.
PREDICTOR = {
    "project": "eh_proj", "embedding_norm": "enorm", "features_norm": "hnorm", "norm": "shared_head.norm",
    "embedding": "embed_tokens", "head": "shared_head.head",
}  # fmt: skip
SHARED = ("", *(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")))


def deepseek_v2(config: Config) -> ModelSpec:
    config.refuse("norm_topk_prob", False)
    config.refuse("topk_method", "greedy", "group_limited_greedy")
    grouped = config.values.get("topk_method") == "group_limited_greedy"
    router = dict(scale=config.number("routed_scaling_factor", 1.0)) | (_groups(config, 1, 1) if grouped else {})
    return _spec(config, "deepseek_v2", router, False, dense=0, shared=2, context=2048)


def deepseek_v3(config: Config) -> ModelSpec:
    config.refuse("topk_method", "noaux_tc")
    router = dict(group_best=2, scoring="sigmoid", correction="mlp.gate.e_score_correction_bias")
    router |= _groups(config, 8, 4) | dict(scale=config.number("routed_scaling_factor", 2.5))
    return _spec(config, "deepseek_v3", router, config.flag("norm_topk_prob", True), dense=3, shared=1, context=4096)


def _groups(config: Config, count: int, num_chosen: int) -> dict[str, Any]:
    return dict(num_groups=config.count("n_group", count), num_chosen_groups=config.count("topk_group", num_chosen))


def _spec(config: Config, family: str, router: dict[str, Any], renormalized: bool, **assumed: int) -> ModelSpec:
    config.refuse("moe_layer_freq", 1)
    query_rank = config.values.get("q_lora_rank", 1536)
    latent = LatentSpec(
        rank=config.count("kv_lora_rank"), rope_dim=config.count("qk_rope_head_dim"),
        nope_dim=config.count("qk_nope_head_dim"), value_dim=config.count("v_head_dim"),
        query_rank=None if query_rank is None else counted("q_lora_rank", query_rank),
    )  # fmt: skip
    if latent.rope_dim % 2 or latent.rank % 2:
        raise ValueError(f"kv_lora_rank {latent.rank} and qk_rope_head_dim {latent.rope_dim} are not both even")
    size, bias = config.count("moe_intermediate_size"), config.flag("attention_bias")
    num_shared = config.values.get("n_shared_experts", assumed["shared"]) or 0
    shared = size * counted("n_shared_experts", num_shared) if num_shared else 0
    experts = ExpertsSpec(
        num_experts=config.count("n_routed_experts"), num_chosen=config.count("num_experts_per_tok"), intermediate_size=size,
        names=NAMES, renormalized=renormalized, shared_size=shared, shared_names=SHARED, **router,
    )  # fmt: skip
    first = config.values.get("first_k_dense_replace", assumed["dense"]) or 0
    num_extra = config.values.get("num_nextn_predict_layers") or 0
    around = around_predictor(PREDICTOR, f"model.layers.{config.num_layers}.")
    layers = tuple(LayerSpec(experts=experts if index >= first else None) for index in range(config.num_layers))
    rope = config.rope(assumed["context"], interleaved=config.flag("rope_interleave", True))
    spec = config.spec(
        family, [replace(rope, rotary_dim=latent.rope_dim)], layers, head_dim=latent.row_dim, latent=latent,
        qkv_bias=bias, output_bias=bias, attention_scale=_scale(latent, rope), num_extra_layers=num_extra,
        predictor=PredictorSpec(LayerSpec(experts=experts), around) if num_extra else None,
    )  # fmt: skip
    return replace(spec, num_kv_heads=1, head_dim=latent.row_dim)  # folders may name a head_dim of their own


def _scale(latent: LatentSpec, rope: RopeSpec) -> float:
    """Return the factor on scores: by the elements of a head before absorption, and yarn's factor for all of them."""
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    if rope.kind == "default" or not (mscale := rope.parameters.get("mscale_all_dim")):
        return scale
    return scale * yarn_scale(rope.parameters["factor"], mscale) ** 2
