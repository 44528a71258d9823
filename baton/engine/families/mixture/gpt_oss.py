"""gpt-oss: attention sinks, a window in every other layer, clamped SwiGLU, biases everywhere, experts in one tensor."""

from dataclasses import replace

from baton.engine.core.model_spec import ExpertsSpec, ModelSpec
from baton.engine.families.config import Config

NAMES = ("mlp.router", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# Used if the file has no rope.
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def gpt_oss(config: Config) -> ModelSpec:
    config.activation()
    experts = ExpertsSpec(
        num_experts=config.count("num_local_experts", 128),
        num_chosen=config.count("num_experts_per_tok", 4),
        intermediate_size=config.count("intermediate_size"),
        names=NAMES,
        bias=True,
        inputs_first=True,
        interleaved=True,
    )
    layers = config.alternating(lambda layer: layer % 2 == 0, window=128)
    is_given = config.values.get("rope_parameters") or config.values.get("rope_scaling")
    rope = config.rope(131072, theta=150000.0, parameters=None if is_given else YARN)
    bias = config.flag("attention_bias", True)
    return config.spec(
        "gpt_oss", [rope], tuple(replace(layer, experts=experts) for layer in layers),
        num_kv_heads=8, head_dim=64, norm=config.norm(1e-5), sinks=True, qkv_bias=bias, output_bias=bias,
        activation="clamped_swiglu", swiglu_alpha=config.number("swiglu_alpha", 1.702),
        swiglu_limit=config.number("swiglu_limit", 7.0),
    )  # fmt: skip
