"""Describe a model as data: its layers, conventions and tensor names.

No family is named here; engine/families reads a config.json into a ModelSpec.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from baton.engine.core.state_spec import StateSpec
from baton.gguf import is_gguf
from kvtransfer.layout import STATE, KVGroup, KVLayout

PREDICTOR = "mtp"  # prefix of the names of the tensors around a layer that predicts further tokens
STATE_ROW = 4096  # elements that are digested together; a layer's state is padded to whole rows
# What reading a config raises for values of the wrong type.
WRONG_VALUE = (TypeError, ValueError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """A rotary embedding as the config gives it. `parameters` depend on the kind (factor, betas, lists of factors)."""

    kind: str
    theta: float
    max_position_embeddings: int
    original_context: int  # the context that the model was trained at, before scaling
    parameters: dict = field(default_factory=dict)
    rotary_dim: int | None = None  # the leading elements of a head that are rotated; None: all
    interleaved: bool = False  # an element pairs with its neighbour, instead of with the one half the rotated part away

    @property
    def context(self) -> int:
        """The tokens that are served by default. Longrope: the original context, up to which its short factors hold."""
        if self.kind == "longrope":
            return self.original_context
        if self.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.parameters["factor"])
        if self.kind == "yarn":
            scaled = int(self.original_context * (self.parameters.get("factor") or 1))
            return max(self.max_position_embeddings, scaled)
        return self.max_position_embeddings


def yarn_scale(factor: float, mscale: float) -> float:
    """Return yarn's scale of queries and keys for a context that is `factor` times the one trained at."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A kind of norm."""

    eps: float
    kind: str = "rms"  # rms | layer (subtracts the mean)
    offset: float = 0.0  # added to the weight as stored
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts instead of a layer's MLP.

    `names`: the router, then gate, up and down of an expert with {} for its index (no gate if MLPs have none). Or, with
    the tensors' full names: the router, then gate over up, and down, each one tensor for all experts.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    names: tuple[str, ...]
    renormalized: bool = True  # the chosen experts' probabilities are scaled to sum to one
    shared_size: int = 0  # intermediate size of the expert that every token uses; 0: none
    shared_names: tuple[str, ...] = ()  # of that expert: the gate of its output ("": none), then gate, up and down
    bias: bool = False  # of the router and of every expert's linears
    inputs_first: bool = False  # tensors of all experts are [experts, in, out]
    interleaved: bool = False  # each gate is next to its up among the outputs
    scoring: str = "softmax"  # of a row's scores: softmax | sigmoid
    correction: str = ""  # a tensor added to the scores for choosing experts, not for weighing them
    num_groups: int = 1  # equal groups of experts with neighbouring indices
    num_chosen_groups: int = 1  # experts are chosen from these alone
    group_best: int = 1  # how many of its highest scores are summed to rank a group
    scale: float = 1.0  # applied to the final weights
    scales_inputs: bool = False  # weights multiply an expert's inputs, not its outputs
    latent_size: int = 0  # of the rows that experts read and write; 0: the hidden size
    latent_names: tuple[str, ...] = ()  # the projections from hidden states to these rows and back
    stacked_names: tuple[str, ...] = ()  # instead of `names` if the folder has one tensor for all experts

    def __post_init__(self) -> None:
        """Raise ValueError if more experts are chosen than there are, or groups do not divide them."""
        if self.num_chosen > self.num_experts:
            raise ValueError(f"num_experts_per_tok {self.num_chosen}: there are {self.num_experts} experts")
        size, left = divmod(self.num_experts, self.num_groups)
        if left or size < self.group_best or not self.num_chosen_groups <= self.num_groups:
            groups = f"n_group {self.num_groups} with topk_group {self.num_chosen_groups}"
            raise ValueError(f"{groups}: {self.num_experts} experts are not parted so")
        if self.num_chosen > size * self.num_chosen_groups:
            most = f"{self.num_chosen_groups} of {self.num_groups} groups hold {size * self.num_chosen_groups}"
            raise ValueError(f"num_experts_per_tok {self.num_chosen}: {most}")

    @property
    def stacked(self) -> bool:
        """Whether one tensor holds all experts."""
        return "{}" not in self.names[-1]

    @property
    def is_plain(self) -> bool:
        """Whether a row's experts are those with the highest scores, weighed by their softmax."""
        grouped = self.num_groups > 1 or self.correction or self.scoring != "softmax" or self.scale != 1
        return not grouped and (not self.shared_size or bool(self.shared_names[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Latent attention (MLA): keys and values of all heads are products of one short row, and only that row is kept.

    Of a head's elements, `nope_dim` are multiplied with that row, and `rope_dim` with the rotated key that all heads
    share.
    """

    rank: int  # elements of the row
    rope_dim: int
    nope_dim: int
    value_dim: int  # of a head's output
    query_rank: int | None = None  # size of the row that queries are made of; None: the hidden state

    @property
    def row_dim(self) -> int:
        """The elements kept for a token, and of a query after absorption."""
        return self.rope_dim + self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureSpec:
    """A temperature of attention in layers without rope: queries at position p times 1 + scale * log(1 + (p + 1) //
    every)."""

    scale: float
    every: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ between the layers of a model."""

    window: int | None = None  # positions that a token attends to, itself included; None: all
    rope: int | None = 0  # which of the model's ropes; None: positions are not encoded
    experts: ExpertsSpec | None = None
    has_attention: bool = True
    state: StateSpec | None = None  # mixes tokens instead of attention, or beside it
    has_mlp: bool = True


@dataclass(frozen=True, slots=True)
class PredictorSpec:
    """A layer after the last one that predicts the token after the next one.

    Its input is what `project` makes of a token's embedding and the hidden state before it, each normed.
    """

    layer: LayerSpec
    # As in TensorNames: of the layer, whose index follows the last layer's, and below PREDICTOR of project,
    # embedding_norm, features_norm and norm.
    renamed: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The factors by which the parts of the outputs of a layer's linears are multiplied, in their order."""

    qkv: tuple[float, ...] = (1.0, 1.0, 1.0)
    output: tuple[float, ...] = (1.0,)
    gate_up: tuple[float, ...] = (1.0, 1.0)
    down: tuple[float, ...] = (1.0,)
    state: tuple[float, ...] = (1.0,) * 5  # gates, rows, what they write, what they read, steps
    state_output: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a layer's modules below `model.layers.N.`; "" if there is no such norm. Several names are
    concatenated."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    output: str = "self_attn.o_proj"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    state: str = ""  # the module that mixes tokens by a state
    # Prefixes of names as written here, and as in the checkpoint; the first match counts.
    renamed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and conventions of one model. Sizes in elements, `context` in tokens."""

    folder: Path  # or a .gguf file
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: NormSpec
    ropes: tuple[RopeSpec, ...]
    layers: tuple[LayerSpec, ...]
    tied: bool
    dtype: str  # the checkpoint's: bf16 | fp16 | fp32
    eos_token_ids: tuple[int, ...] = ()
    generation_config: dict = field(default_factory=dict)
    names: TensorNames = TensorNames()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # head: one weight for all heads | heads: one for each head | all: over all heads of a token | unit: each head
    # without a weight, in layers with rope
    qk_norm: str = ""
    attention_gate: bool = False  # q's module makes a query for each head, and a gate for its output
    parallel: bool = False  # attention and MLP read the same normed rows, and their outputs are added
    # silu | gelu_tanh | relu2 (squared) | clamped_swiglu: (up + 1) * gate * sigmoid(alpha * gate), both clamped
    activation: str = "silu"
    swiglu_alpha: float = 1.0
    swiglu_limit: float = 0.0
    gated: bool = True
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    chunked: bool = False  # a token of a layer with a window attends from the last multiple of the window on
    temperature: TemperatureSpec | None = None
    latent: LatentSpec | None = None  # if set, head_dim is its row_dim, and there is one KV head
    num_extra_layers: int = 0  # in the files after the last one, which predict further tokens: not part of the model
    predictor: PredictorSpec | None = None  # the first of these layers
    sinks: bool = False  # each head has an additional score in the softmax, without a value
    multipliers: Multipliers | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attention and MLP
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    unroped_context: int = 0  # the context of a model without rope

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The indices of the layers that have KV."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.has_attention)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The indices of the layers that keep a recurrent state."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.state is not None)

    @property
    def state(self) -> StateSpec | None:
        """The recurrent state of its layers, the same for all that have one; None: none has."""
        return next((layer.state for layer in self.layers if layer.state is not None), None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of the layers that have KV, None for a layer without one."""
        return tuple(layer.window for layer in self.layers if layer.has_attention)

    @property
    def kv_window(self) -> int | None:
        """The largest window, if every layer has one; KV further back is never read.

        None if a layer has no window, or if layers keep a state, whose checkpoints need whole prefixes.
        """
        if not self.windows or None in self.windows or self.state is not None:
            return None
        return max(window for window in self.windows if window is not None)

    @property
    def partial_window(self) -> int | None:
        """The largest window, if only some layers have one; None otherwise, or if layers keep a state."""
        found = [window for window in self.windows if window is not None]
        return max(found) if 0 < len(found) < len(self.windows) and self.state is None else None

    @property
    def context(self) -> int:
        """The longest sequence in tokens by default."""
        return min((rope.context for rope in self.ropes), default=self.unroped_context)

    @property
    def longest_context(self) -> int:
        """The longest context that may be configured: more than `context` only for longrope, with its long factors."""
        return min(
            (max(rope.context, rope.max_position_embeddings) for rope in self.ropes), default=self.unroped_context
        )

    @property
    def name(self) -> str:
        return self.folder.stem if is_gguf(self.folder) else self.folder.name

    def differs_from_llama(self, experts: bool = False) -> str:
        """Return the first feature that layers of the Llama family lack, or "". `experts`: a mixture is no such
        feature."""
        default = TensorNames()
        places = ("before_attention", "after_attention", "before_mlp", "after_mlp")
        found = {
            "layers with a state": self.state is not None,
            "attention sinks": self.sinks,
            "gated attention": self.attention_gate,
            "latent attention": self.latent is not None,
            "mixture of experts": not experts and any(layer.experts for layer in self.layers),
            "layers without rope": any(layer.rope is None for layer in self.layers),
            "norms elsewhere": any(bool(getattr(self.names, at)) != bool(getattr(default, at)) for at in places),
            "layer norm": self.norm.kind != "rms",
            "norm weights with an offset": self.norm.offset != 0,
            "q and k normed otherwise than by one weight": self.qk_norm in ("heads", "all", "unit"),
            "attention in chunks": self.chunked,
            "attention with a temperature": self.temperature is not None,
            "attention beside the MLP": self.parallel,
            f"activation {self.activation}": self.activation != "silu",
            "an MLP without gate": not self.gated,
            "scaled residuals": self.residual_scale != 1,
        }
        return next((what for what, there in found.items() if there), "")

    def num_layer_weights(self, chosen_only: bool = False) -> int:
        """Return the number of weights of all layers' linears; with `chosen_only`, only of experts that one token
        uses."""
        total = 0
        for layer in self.layers:
            width = (2 + self.gated) * self.intermediate_size if layer.has_mlp else 0
            if (experts := layer.experts) is not None:  # router, the expert of every token, to latent rows and back
                width = experts.num_experts + (2 + self.gated) * experts.shared_size + 2 * experts.latent_size
            total += self.hidden_size * width + layer.has_attention * self._num_attention_weights
            if layer.state is not None:
                total += self.hidden_size * (layer.state.projected_size + layer.state.inner_size)
                total += layer.state.num_selection_weights
        return total + self.num_expert_weights(chosen_only)

    @property
    def _num_attention_weights(self) -> int:
        if (latent := self.latent) is None:
            per_head = 2 + self.attention_gate  # q, output; k and v of the others
            return self.hidden_size * (per_head * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        queries, query_size = self.hidden_size, self.num_heads * (latent.nope_dim + latent.rope_dim)
        if latent.query_rank is not None:
            queries = latent.query_rank
        total = queries * query_size + (self.hidden_size * queries if latent.query_rank else 0)
        total += self.hidden_size * (latent.row_dim + self.num_heads * latent.value_dim)
        return total + self.num_heads * latent.rank * (latent.nope_dim + latent.value_dim)

    def num_expert_weights(self, chosen_only: bool = False) -> int:
        """Return the number of weights of all routed experts; with `chosen_only`, of those that one token uses."""
        found = [layer.experts for layer in self.layers if layer.experts is not None]
        counts = (experts.num_chosen if chosen_only else experts.num_experts for experts in found)
        sizes = ((e.latent_size or self.hidden_size) * e.intermediate_size for e in found)
        return (2 + self.gated) * sum(count * size for count, size in zip(counts, sizes, strict=True))

    def kv_group(self, form: str, block_size: int) -> KVGroup:
        """Return the layout of this model's KV in a pool; all layers share blocks."""
        kind = "paged" if self.latent is None else "latent"
        return KVGroup(kind, len(self.kv_layers), self.num_kv_heads, self.head_dim, form, block_size)

    def kv_layout(self, form: str, block_size: int) -> KVLayout:
        """Return the layout of a pool: the group of KV, then the group of states if layers keep one."""
        groups = [self.kv_group(form, block_size)]
        if (state := self.state) is not None:
            num_rows = -(-state.num_elements // STATE_ROW)
            groups.append(KVGroup(STATE, len(self.state_layers), num_rows, STATE_ROW, "fp32", 1))
        return KVLayout(tuple(groups))
