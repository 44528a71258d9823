"""Falcon-H1: Mamba-2 and attention side by side in every layer, and a multiplier for each part of each product."""

from baton.engine.core.model_spec import LayerSpec, ModelSpec, Multipliers, TensorNames
from baton.engine.families.config import Config
from baton.engine.families.hybrid.mamba2 import state_of_mamba

NAMES = TensorNames(
    before_mlp="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    state="mamba",
    renamed=(("model.norm.", "model.final_layernorm."),),
)


def falcon_h1(config: Config) -> ModelSpec:
    config.refuse("attention_bias", False)  # multipliers of inputs are applied to outputs instead
    config.refuse("mamba_proj_bias", False)
    config.refuse("mlp_bias", False)
    groups = config.count("mamba_n_groups", 1)
    state = state_of_mamba(
        config, config.number("rms_norm_eps", 1e-5), groups if config.flag("mamba_rms_norm") else 0,
        inner=None if config.values.get("mamba_d_ssm", 1024) is None else config.count("mamba_d_ssm", 1024),
        norm_first=config.flag("mamba_norm_before_gate", True),
    )  # fmt: skip
    return config.spec(
        "falcon_h1", [config.rope(8192)], (LayerSpec(state=state),) * config.num_layers, num_kv_heads=8,
        norm=config.norm(1e-5), names=NAMES, multipliers=_multipliers(config),
        embedding_scale=config.number("embedding_multiplier", 1.0), logit_scale=config.number("lm_head_multiplier", 1.0),
    )  # fmt: skip


def _multipliers(config: Config) -> Multipliers:
    attention, ssm = config.number("attention_in_multiplier", 1.0), config.number("ssm_in_multiplier", 1.0)
    gate, down = _numbers(config, "mlp_multipliers", 2)
    return Multipliers(
        qkv=(attention, attention * config.number("key_multiplier", 1.0), attention),
        output=(config.number("attention_out_multiplier", 1.0),),
        gate_up=(gate, 1.0),
        down=(down,),
        state=tuple(ssm * by for by in _numbers(config, "ssm_multipliers", 5)),
        state_output=(config.number("ssm_out_multiplier", 1.0),),
    )


def _numbers(config: Config, key: str, count: int) -> tuple[float, ...]:
    given = config.values.get(key) or [1.0] * count
    if not isinstance(given, list) or len(given) != count or not all(isinstance(by, float | int) for by in given):
        raise ValueError(f"{key} is {given!r:.40}, not {count} numbers")
    return tuple(map(float, given))
