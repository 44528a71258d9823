"""GLM-4 dense (0414): norms before and after both halves of a layer, half of each head rotated in pairs."""

from baton.engine.core.model_spec import ModelSpec, TensorNames
from baton.engine.families.config import Config

NAMES = TensorNames(
    after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm", gate_up=("mlp.gate_up_proj",)
)
HEAD_DIM = 128  # default


def glm4(config: Config) -> ModelSpec:
    rope = config.rope(131072, partial=0.5, interleaved=True, head_dim=HEAD_DIM)
    bias = config.flag("attention_bias", True)
    norm = config.norm(1.5625e-07)
    return config.spec("glm4", [rope], num_kv_heads=2, head_dim=HEAD_DIM, norm=norm, names=NAMES, qkv_bias=bias)
