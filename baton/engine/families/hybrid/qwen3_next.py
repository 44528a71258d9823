"""Qwen3-Next: three layers of gated delta net to one of gated attention, Qwen2-MoE's experts, zero-centred norms."""

from baton.engine.core.model_spec import ExpertsSpec, LayerSpec, ModelSpec, PredictorSpec, TensorNames
from baton.engine.core.state_spec import DeltaNetSpec
from baton.engine.families.config import Config, around_predictor
from baton.engine.families.hybrid.mamba2 import ATTENTION, MAMBA, mixed
from baton.engine.families.mixture.qwen_moe import NAMES, SHARED, sparse


def qwen3_next(config: Config) -> ModelSpec:
    config.refuse("hidden_act", "silu")
    experts = ExpertsSpec(
        config.count("num_experts", 512), config.count("num_experts_per_tok", 10),
        config.count("moe_intermediate_size", 512), NAMES, config.flag("norm_topk_prob", True),
        config.count("shared_expert_intermediate_size", 512), SHARED,
    )  # fmt: skip
    state = DeltaNetSpec(
        config.count("linear_num_value_heads", 32), config.count("linear_num_key_heads", 16),
        config.count("linear_key_head_dim", 128), config.count("linear_value_head_dim", 128),
        config.count("linear_conv_kernel_dim", 4), config.number("rms_norm_eps", 1e-6),
    )  # fmt: skip
    if (types := config.values.get("layer_types")) is None:
        every = config.count("full_attention_interval", 4)
        types = [MAMBA if (index + 1) % every else ATTENTION for index in range(config.num_layers)]
    layers = sparse(config, mixed(config, LayerSpec(), state, types), experts)
    theirs = {"project": "fc", "embedding_norm": "pre_fc_norm_embedding", "features_norm": "pre_fc_norm_hidden"}
    renamed = (*around_predictor(theirs, "mtp."), (f"model.layers.{config.num_layers}.", "mtp.layers.0."))
    bias = config.flag("attention_bias")
    return config.spec(
        "qwen3_next", [config.rope(32768, partial=0.25)], layers, num_kv_heads=2, head_dim=256,
        norm=config.norm(offset=1.0), names=TensorNames(state="linear_attn"), qk_norm="head", qkv_bias=bias,
        output_bias=bias, attention_gate=True,
        predictor=PredictorSpec(LayerSpec(experts=experts), renamed),
    )  # fmt: skip
