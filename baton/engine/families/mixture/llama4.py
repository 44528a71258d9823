"""Llama 4's text layers: attention in chunks, except for every fourth layer, which sees the whole context without rope
and scales queries by position; experts with inputs scaled by the router, beside a shared one."""

from dataclasses import replace

from baton.engine.core.model_spec import ExpertsSpec, LayerSpec, ModelSpec, TemperatureSpec, TensorNames
from baton.engine.families.config import Config

EXPERTS = tuple(f"feed_forward.{name}" for name in ("router", "experts.gate_up_proj", "experts.down_proj"))
SHARED = ("", *(f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")))
NAMES = TensorNames(gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj")
CHUNKED, FULL = "chunked_attention", "full_attention"


def llama4(config: Config) -> ModelSpec:
    size = config.count("intermediate_size", 8192)
    experts = ExpertsSpec(
        num_experts=config.count("num_local_experts", 16),
        num_chosen=config.count("num_experts_per_tok", 1),
        intermediate_size=size,
        names=EXPERTS,
        renormalized=False,
        shared_size=size,
        shared_names=SHARED,
        inputs_first=True,
        scoring="sigmoid",
        scales_inputs=True,
    )
    step, chunk = config.count("interleave_moe_layer_step", 1), config.values.get("attention_chunk_size", 8192)
    sparse = config.values.get("moe_layers")
    sparse = range(step - 1, config.num_layers, step) if sparse is None else sparse
    every = config.count("no_rope_layer_interval", 4)
    turns = config.values.get("no_rope_layers") or [(index + 1) % every for index in range(config.num_layers)]
    types = config.values.get("layer_types") or [CHUNKED if turn and chunk is not None else FULL for turn in turns]
    if len(turns) != config.num_layers or len(types) != config.num_layers:
        raise ValueError(f"no_rope_layers and layer_types are not those of {config.num_layers} layers")
    if unknown := [kind for kind in types if kind not in (CHUNKED, FULL)]:
        raise ValueError(f"layer_types: {unknown[0]!r:.40} is not supported, one of {CHUNKED}, {FULL}")
    layers = tuple(
        LayerSpec(
            config.count("attention_chunk_size", 8192) if kind == CHUNKED else None, 0 if turn else None,
            experts if index in sparse else None,
        )
        for index, (turn, kind) in enumerate(zip(turns, types, strict=True))
    )  # fmt: skip
    temperature, tuning = None, config.values.get("attn_temperature_tuning", True)
    if bool(tuning) if isinstance(tuning, int) else config.flag("attn_temperature_tuning"):  # transformers 4.51 wrote 4
        temperature = TemperatureSpec(scale=config.number("attn_scale", 0.1), every=config.count("floor_scale", 8192))
    dense = Config(
        config.folder,
        config.values | {"intermediate_size": config.count("intermediate_size_mlp", 16384)},
        config.generation,
    )
    bias, rope = config.flag("attention_bias"), dense.rope(131072, theta=500_000.0, interleaved=True)
    if is_normed := config.flag("use_qk_norm", True):  # behind the rope, so that its factor has no effect
        rope = replace(rope, parameters=rope.parameters | {"attention_factor": 1.0})
    return dense.spec(
        "llama4", [rope], layers, num_kv_heads=8, head_dim=128, norm=config.norm(1e-5), names=NAMES,
        qk_norm="unit" if is_normed else "", qkv_bias=bias, output_bias=bias, chunked=CHUNKED in types, temperature=temperature,
    )  # fmt: skip
