"""Granite 3 MoE: Granite's multipliers, the experts of a layer in one tensor."""

from baton.engine.core.model_spec import ExpertsSpec, LayerSpec, ModelSpec
from baton.engine.families.config import Config
from baton.engine.families.dense.granite import multipliers

NAMES = tuple(f"block_sparse_moe.{name}" for name in ("router.layer", "input_linear.weight", "output_linear.weight"))


def granite_moe(config: Config) -> ModelSpec:
    experts = ExpertsSpec(
        num_experts=config.count("num_local_experts", 8),
        num_chosen=config.count("num_experts_per_tok", 2),
        intermediate_size=config.count("intermediate_size"),
        names=NAMES,
    )
    layers = (LayerSpec(experts=experts),) * config.num_layers
    return config.spec("granite_moe", [config.rope(2048)], layers, **multipliers(config))
