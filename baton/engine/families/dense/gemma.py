"""Gemma 2 and the text models of Gemma 3: norms around both halves of a layer, alternating windows, GELU."""

from baton.engine.core.model_spec import ModelSpec, TensorNames
from baton.engine.families.config import Config

NAMES = TensorNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def gemma2(config: Config) -> ModelSpec:
    layers = config.alternating(lambda layer: layer % 2 == 0)
    capped = {
        "attention_softcap": config.number_or_none("attn_logit_softcapping", 50.0),
        "logit_softcap": config.number_or_none("final_logit_softcapping", 30.0),
    }
    return config.spec("gemma2", [config.rope(8192)], layers, **_common(config), **capped)


def gemma3(config: Config) -> ModelSpec:
    """Return a spec of five layers with a window and their own base, then one without, repeated."""
    pattern = config.count("sliding_window_pattern", 6)
    layers = config.alternating(lambda layer: (layer + 1) % pattern != 0, full=0, sliding=1)
    capped = {
        "attention_softcap": config.number_or_none("attn_logit_softcapping", None),
        "logit_softcap": config.number_or_none("final_logit_softcapping", None),
    }
    ropes = config.ropes_by_type(131072, theta=1e6, local_theta=10_000.0)
    return config.spec("gemma3", ropes, layers, qk_norm="head", **_common(config), **capped)


def _common(config: Config) -> dict:
    config.refuse("use_bidirectional_attention", False)
    bias = config.flag("attention_bias")
    return {
        "num_kv_heads": 4,
        "head_dim": 256,
        "norm": config.norm(offset=1.0),
        "names": NAMES,
        "activation": config.activation("hidden_activation", "gelu_pytorch_tanh"),
        "attention_scale": config.number("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": config.count("hidden_size") ** 0.5,
        "tied": True,
        "qkv_bias": bias,
        "output_bias": bias,
    }
