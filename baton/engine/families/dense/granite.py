"""Granite 3: Llama's layers with multipliers of embeddings, attention, residuals and logits."""

from baton.engine.core.model_spec import ModelSpec
from baton.engine.families.config import Config


def granite(config: Config) -> ModelSpec:
    return config.spec("granite", [config.rope(2048)], mlp_bias=config.flag("mlp_bias"), **multipliers(config))


def multipliers(config: Config) -> dict:
    """Return what all families of Granite add to Llama's layers."""
    bias = config.flag("attention_bias")
    return {
        "attention_scale": config.number("attention_multiplier", 1.0),
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "logit_scale": 1.0 / config.number("logits_scaling", 1.0),
        "qkv_bias": bias,
        "output_bias": bias,
    }
