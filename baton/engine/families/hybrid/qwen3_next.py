"""Qwen3-Next and Qwen3.5: three layers of gated delta net for one of gated attention, zero-centred norms; an MLP, or
experts beside a shared one."""

from dataclasses import replace
from typing import Any

from baton.engine.core.model_spec import ExpertsSpec, LayerSpec, ModelSpec, PredictorSpec, TensorNames
from baton.engine.core.state_spec import DeltaNetSpec
from baton.engine.families.config import Config, around_predictor
from baton.engine.families.hybrid.mamba2 import ATTENTION, MAMBA, mixed
from baton.engine.families.mixture.qwen_moe import NAMES, SHARED, sparse

HEAD_DIM = 256  # default
STACKED = ("mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def qwen3_next(config: Config) -> ModelSpec:
    experts = _experts(config, 512, 10, config.flag("norm_topk_prob", True))
    theirs = {"project": "fc", "embedding_norm": "pre_fc_norm_embedding", "features_norm": "pre_fc_norm_hidden"}
    renamed = (*around_predictor(theirs, "mtp."), (f"model.layers.{config.num_layers}.", "mtp.layers.0."))
    predictor = PredictorSpec(LayerSpec(experts=experts), renamed)
    layers = sparse(config, _layers(config), experts)
    return _spec(config, "qwen3_next", layers, num_kv_heads=2, predictor=predictor)


def qwen3_5(config: Config) -> ModelSpec:
    return _spec(config, "qwen3_5", _layers(config, is_split=True), num_kv_heads=4)


def qwen3_5_moe(config: Config) -> ModelSpec:
    """Return a spec with experts in every layer; the config does not mention MLPs."""
    experts = replace(_experts(config, 256, 8, True), stacked_names=STACKED)
    layers = sparse(config, _layers(config, is_split=True), experts)
    sizes = {"intermediate_size": experts.intermediate_size}
    return _spec(Config(config.folder, sizes | config.values, config.generation), "qwen3_5_moe", layers, num_kv_heads=2)


def _experts(config: Config, num_experts: int, num_chosen: int, renormalized: bool) -> ExpertsSpec:
    return ExpertsSpec(
        num_experts=config.count("num_experts", num_experts),
        num_chosen=config.count("num_experts_per_tok", num_chosen),
        intermediate_size=config.count("moe_intermediate_size", 512),
        names=NAMES,
        renormalized=renormalized,
        shared_size=config.count("shared_expert_intermediate_size", 512),
        shared_names=SHARED,
    )


def _layers(config: Config, is_split: bool = False) -> tuple[LayerSpec, ...]:
    state = DeltaNetSpec(
        num_heads=config.count("linear_num_value_heads", 32),
        num_key_heads=config.count("linear_num_key_heads", 16),
        key_dim=config.count("linear_key_head_dim", 128),
        value_dim=config.count("linear_value_head_dim", 128),
        taps=config.count("linear_conv_kernel_dim", 4),
        eps=config.number("rms_norm_eps", 1e-6),
        is_split=is_split,
    )
    if (types := config.values.get("layer_types")) is None:
        every = config.count("full_attention_interval", 4)
        types = [MAMBA if (index + 1) % every else ATTENTION for index in range(config.num_layers)]
    return mixed(config, LayerSpec(), state, types)


def _spec(
    config: Config, family: str, layers: tuple[LayerSpec, ...], num_kv_heads: int, **differences: Any
) -> ModelSpec:
    config.refuse("hidden_act", "silu")
    bias = config.flag("attention_bias")
    rope = config.rope(32768, partial=0.25, head_dim=HEAD_DIM)
    return config.spec(
        family, [rope], layers, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM,
        norm=config.norm(offset=1.0), names=TensorNames(state="linear_attn"), qk_norm="head", qkv_bias=bias,
        output_bias=bias, attention_gate=True, **differences,
    )  # fmt: skip
