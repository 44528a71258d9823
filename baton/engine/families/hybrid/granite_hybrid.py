"""Granite 4 hybrid: layers of Mamba-2 and of attention, Granite's multipliers, a shared MLP beside experts or
instead."""

from baton.engine.core.model_spec import ExpertsSpec, LayerSpec, ModelSpec, TensorNames
from baton.engine.families.config import Config
from baton.engine.families.dense.granite import multipliers
from baton.engine.families.hybrid.mamba2 import mixed, state_of_mamba
from baton.engine.families.mixture.granite_moe import NAMES as EXPERTS

SHARED = ("shared_mlp.input_linear", "shared_mlp.output_linear")
NAMES = TensorNames(gate_up=SHARED[:1], down=SHARED[1], state="mamba")


def granite_hybrid(config: Config) -> ModelSpec:
    position = config.values.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise ValueError(f"position_embedding_type {position!r:.40} is not supported, one of rope, nope")
    has_rope, width, experts = position == "rope", config.count("shared_intermediate_size", 1024), None
    if config.values.get("num_local_experts", 8):
        experts = ExpertsSpec(
            num_experts=config.count("num_local_experts", 8),
            num_chosen=config.count("num_experts_per_tok", 2),
            intermediate_size=config.count("intermediate_size"),
            names=EXPERTS,
            shared_size=width,
            shared_names=("", *SHARED),
        )
    layers = mixed(
        config, LayerSpec(rope=0 if has_rope else None, experts=experts),
        state_of_mamba(config, config.number("rms_norm_eps", 1e-6)), config.values.get("layer_types"),
    )  # fmt: skip
    plain = Config(config.folder, config.values | {"intermediate_size": width}, config.generation)
    return plain.spec(
        "granite_hybrid", [config.rope(2048)] if has_rope else [], layers, names=NAMES,
        unroped_context=config.count("max_position_embeddings", 2048), **multipliers(config),
    )  # fmt: skip
