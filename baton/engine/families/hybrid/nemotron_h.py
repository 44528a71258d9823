"""Nemotron-H: each layer has a norm and one of Mamba-2, attention without positions, an MLP without a gate, or experts
of such MLPs."""

from baton.engine.core.model_spec import ExpertsSpec, LayerSpec, ModelSpec, NormSpec, TensorNames
from baton.engine.core.state_spec import Mamba2Spec
from baton.engine.families.config import Config
from baton.engine.families.hybrid.mamba2 import step_limit

MAMBA, ATTENTION, MLP, EXPERTS = "mamba", "attention", "mlp", "moe"
TYPES = {
    MAMBA: MAMBA, "linear_attention": MAMBA, "M": MAMBA,
    ATTENTION: ATTENTION, "full_attention": ATTENTION, "*": ATTENTION,
    MLP: MLP, "-": MLP,
    EXPERTS: EXPERTS, "E": EXPERTS,
}  # fmt: skip
NAMES = TensorNames(
    before_attention="norm",
    before_mlp="norm",
    output="mixer.o_proj",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    state="mixer",
    renamed=(
        ("model.embed_tokens.", "backbone.embeddings."), ("model.norm.", "backbone.norm_f."), ("model.", "backbone."),
        ("model.embed_tokens.", "model.embeddings."), ("model.norm.", "model.norm_f."),
    ),
)  # fmt: skip


def nemotron_h(config: Config) -> ModelSpec:
    config.refuse("mamba_hidden_act", "silu")
    config.refuse("sliding_window")
    eps, groups = config.number("layer_norm_epsilon", 1e-5), config.count("n_groups", 8)
    state = Mamba2Spec(
        num_heads=config.count("mamba_num_heads", 128), head_dim=config.count("mamba_head_dim", 64), num_groups=groups,
        state_size=config.count("ssm_state_size", 128), taps=config.count("conv_kernel", 4),
        conv_bias=config.flag("use_conv_bias", True), projection_bias=config.flag("use_bias"),
        step_limit=step_limit(config), norm_groups=groups, eps=eps,
    )  # fmt: skip
    given = config.values.get("layers_block_type") or config.values.get("layer_types")
    types = list(given or config.values.get("hybrid_override_pattern") or ())
    if len(types) != config.num_layers:
        raise ValueError(f"layers_block_type names {len(types)} layers of {config.num_layers}")
    layers = {
        MAMBA: LayerSpec(rope=None, has_attention=False, state=state, has_mlp=False),
        ATTENTION: LayerSpec(rope=None, has_mlp=False),
        MLP: LayerSpec(rope=None, has_attention=False),
        EXPERTS: LayerSpec(
            rope=None, has_attention=False, experts=_experts(config) if {"moe", "E"} & {*types} else None
        ),
    }
    if unknown := [kind for kind in types if kind not in TYPES]:
        raise ValueError(f"layers_block_type: {unknown[0]!r:.40} is not supported, one of {', '.join(layers)}")
    if not {MAMBA, ATTENTION} & {TYPES[kind] for kind in types}:
        raise ValueError(f"layers_block_type has neither {MAMBA} nor {ATTENTION}: tokens would not see each other")
    bias = config.flag("attention_bias")
    return config.spec(
        "nemotron_h", [], tuple(layers[TYPES[kind]] for kind in types), num_kv_heads=8, head_dim=128, norm=NormSpec(eps),
        names=NAMES, unroped_context=config.count("max_position_embeddings", 4096), qkv_bias=bias, output_bias=bias,
        mlp_bias=config.flag("mlp_bias"), gated=False, activation=config.activation("mlp_hidden_act", "relu2"),
    )  # fmt: skip


def _experts(config: Config) -> ExpertsSpec:
    config.refuse("mlp_bias", False)
    latent = config.values.get("moe_latent_size")
    return ExpertsSpec(
        num_experts=config.count("n_routed_experts"), num_chosen=config.count("num_experts_per_tok"),
        intermediate_size=config.count("moe_intermediate_size"),
        names=("mixer.gate", "mixer.experts.{}.up_proj", "mixer.experts.{}.down_proj"),
        renormalized=config.flag("norm_topk_prob", True),
        shared_size=config.count("moe_shared_expert_intermediate_size"),
        shared_names=("", "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"), scoring="sigmoid",
        correction="mixer.gate.e_score_correction_bias", num_groups=config.count("n_group", 1),
        num_chosen_groups=config.count("topk_group", 1), group_best=2,
        scale=config.number("routed_scaling_factor", 1.0),
        latent_size=0 if latent is None else config.count("moe_latent_size"),
        latent_names=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    )  # fmt: skip
