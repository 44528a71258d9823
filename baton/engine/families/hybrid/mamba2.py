"""Mamba-2 (and Codestral Mamba in its layout): no attention, no MLP, no rope. Also the parts that hybrids share with
it."""

import math
from dataclasses import replace

from baton.engine.core.model_spec import LayerSpec, ModelSpec, NormSpec, TensorNames
from baton.engine.core.state_spec import Mamba2Spec, StateSpec
from baton.engine.families.config import Config
from baton.protocol import UNLIMITED_CONTEXT

NAMES = TensorNames(
    before_attention="norm",
    before_mlp="",
    state="mixer",
    renamed=(
        ("model.embed_tokens.", "backbone.embeddings."),
        ("model.norm.", "backbone.norm_f."),
        ("model.", "backbone."),
    ),
)
MAMBA, ATTENTION = "mamba", "attention"
TYPES = {MAMBA: MAMBA, "linear_attention": MAMBA, ATTENTION: ATTENTION, "full_attention": ATTENTION}


def mamba2(config: Config) -> ModelSpec:
    config.refuse("hidden_act", "silu")
    eps, groups = config.number("layer_norm_epsilon", 1e-5), config.count("n_groups", 8)
    state = Mamba2Spec(
        num_heads=config.count("num_heads", 128), head_dim=config.count("head_dim", 64), num_groups=groups,
        state_size=config.count("state_size", 128), taps=config.count("conv_kernel", 4),
        conv_bias=config.flag("use_conv_bias", True), projection_bias=config.flag("use_bias"),
        step_limit=step_limit(config), norm_groups=groups, eps=eps,
    )  # fmt: skip
    # Placeholders, since no layer has attention or an MLP.
    none = dict(num_attention_heads=1, num_key_value_heads=1, head_dim=16, intermediate_size=1)
    plain = Config(config.folder, config.values | none, config.generation)
    layers = (LayerSpec(rope=None, has_attention=False, state=state, has_mlp=False),) * config.num_layers
    return plain.spec("mamba2", [], layers, norm=NormSpec(eps), names=NAMES, unroped_context=UNLIMITED_CONTEXT)


def state_of_mamba(
    config: Config, eps: float, norm_groups: int | None = None, inner: int | None = None, norm_first: bool = False
) -> Mamba2Spec:
    """Return a hybrid's Mamba-2, from keys that begin with `mamba_`. `norm_groups`: None for as many as heads have;
    `inner`: elements of a row, if they are not a multiple of the hidden size."""
    config.refuse("hidden_act", "silu")  # also the convolution's activation
    inner = inner or config.count("mamba_expand", 2) * config.count("hidden_size")
    groups = config.count("mamba_n_groups", 1)
    heads, given = config.count("mamba_n_heads", 128), config.values.get("mamba_d_head", "auto")
    head_dim = inner // heads if given in ("auto", None) else config.count("mamba_d_head")
    return Mamba2Spec(
        num_heads=heads, head_dim=head_dim, num_groups=groups, state_size=config.count("mamba_d_state", 256),
        taps=config.count("mamba_d_conv", 4), conv_bias=config.flag("mamba_conv_bias", True),
        projection_bias=config.flag("mamba_proj_bias"), step_limit=step_limit(config),
        norm_groups=groups if norm_groups is None else norm_groups, norm_first=norm_first, eps=eps,
    )  # fmt: skip


def mixed(config: Config, layer: LayerSpec, state: StateSpec, types: object) -> tuple[LayerSpec, ...]:
    """Return layers like `layer`, with a state instead of attention where `types` says mamba, or in all layers without
    `types`. Raises ValueError for types that are unknown or too few."""
    types = [MAMBA] * config.num_layers if types is None else types
    if not isinstance(types, list) or len(types) != config.num_layers:
        raise ValueError(f"layer_types are not those of {config.num_layers} layers")
    if unknown := [kind for kind in types if kind not in TYPES]:
        raise ValueError(f"layer_types: {unknown[0]!r:.40} is not supported, one of {', '.join(TYPES)}")
    without = replace(layer, has_attention=False, state=state)
    return tuple(without if TYPES[kind] == MAMBA else layer for kind in types)


def step_limit(config: Config) -> tuple[float, float]:
    """Return `time_step_limit`, in which infinity is written as a word or in transformers' form."""
    given = config.values.get("time_step_limit") or (0.0, math.inf)
    least, largest = (float(each["__float__"] if isinstance(each, dict) else each) for each in given)
    if not 0 <= least < largest:
        raise ValueError(f"time_step_limit {given!r:.40} is not two numbers, the lower one first")
    return least, largest
