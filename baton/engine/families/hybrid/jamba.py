"""Jamba: layers of Mamba and, at equal distances, of attention without positions; experts instead of some MLPs."""

from dataclasses import replace

from baton.engine.core.model_spec import ExpertsSpec, LayerSpec, ModelSpec, TensorNames
from baton.engine.core.state_spec import MambaSpec
from baton.engine.families.config import Config
from baton.engine.families.hybrid.mamba2 import ATTENTION, MAMBA, mixed

MLP = tuple(f"{name}_proj" for name in ("gate", "up", "down"))
NAMES = TensorNames(
    before_mlp="pre_ff_layernorm",
    gate_up=tuple(f"feed_forward.{name}" for name in MLP[:2]),
    down=f"feed_forward.{MLP[2]}",
    state="mamba",
    renamed=(("model.norm.", "model.final_layernorm."),),
)


def jamba(config: Config) -> ModelSpec:
    config.refuse("hidden_act", "silu")
    config.refuse("sliding_window")
    hidden, rank = config.count("hidden_size"), config.values.get("mamba_dt_rank", "auto")
    state = MambaSpec(
        num_channels=config.count("mamba_expand", 2) * hidden,
        state_size=config.count("mamba_d_state", 16),
        step_rank=-(-hidden // 16) if rank in ("auto", None) else config.count("mamba_dt_rank"),
        taps=config.count("mamba_d_conv", 4),
        conv_bias=config.flag("mamba_conv_bias", True),
        projection_bias=config.flag("mamba_proj_bias"),
        eps=config.number("rms_norm_eps", 1e-6),
    )
    types = [ATTENTION if there else MAMBA for there in _places(config, "attn_layer", 8, 4)]
    layers = mixed(config, LayerSpec(rope=None), state, types)
    if (count := config.count("num_experts", 16)) > 1:
        experts = ExpertsSpec(
            num_experts=count,
            num_chosen=config.count("num_experts_per_tok", 2),
            intermediate_size=config.count("intermediate_size"),
            names=("feed_forward.router", *(f"feed_forward.experts.{{}}.{name}" for name in MLP)),
            renormalized=False,
        )
        places = _places(config, "expert_layer", 2, 1)
        layers = tuple(replace(own, experts=experts if there else None) for own, there in zip(layers, places))
    return config.spec(
        "jamba",
        [],
        layers,
        num_kv_heads=8,
        names=NAMES,
        unroped_context=config.count("max_position_embeddings", 262144),
    )


def _places(config: Config, key: str, period: int, offset: int) -> list[bool]:
    """Return which layers `key`_period and `key`_offset select."""
    period, offset = config.count(f"{key}_period", period), config.values.get(f"{key}_offset", offset)
    if offset not in range(period):
        raise ValueError(f"{key}_offset {offset!r:.40} is not below {key}_period {period}")
    return [index % period == offset for index in range(config.num_layers)]
