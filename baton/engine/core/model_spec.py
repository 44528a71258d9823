"""What a model is made of, as data: layers, conventions and the names of its tensors. No family is named here; the
folder engine/families reads a config.json into this."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from baton.engine.core.state_spec import StateSpec
from baton.gguf import is_gguf
from kvtransfer.layout import STATE, KVGroup, KVLayout

PREDICTOR = "mtp"  # below which the tensors around a layer that predicts further tokens are asked for
STATE_ROW = 4096  # elements that are digested together; a layer's state is padded to whole ones
# What a value of the wrong type raises, somewhere.
WRONG_VALUE = (TypeError, ValueError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding as the config gives it; `parameters` are the kind's own (factor, betas, factor lists)."""

    kind: str
    theta: float
    max_position_embeddings: int
    original_context: int  # the context that the model was trained at, before scaling
    parameters: dict = field(default_factory=dict)
    rotary_dim: int | None = None  # elements of a head that turn, the first ones; None: all
    interleaved: bool = False  # an element pairs with its neighbour; else with the one half the rotated part away

    @property
    def context(self) -> int:
        """Tokens that can be served by default. Longrope: the original context, where short and long factors part."""
        if self.kind == "longrope":
            return self.original_context
        if self.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.parameters["factor"])
        if self.kind == "yarn":
            scaled = int(self.original_context * (self.parameters.get("factor") or 1))
            return max(self.max_position_embeddings, scaled)
        return self.max_position_embeddings


def yarn_scale(factor: float, mscale: float) -> float:
    """Return by what yarn scales queries and keys of a context that is `factor` times the one trained at."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class NormSpec:
    """One kind of norm."""

    eps: float
    kind: str = "rms"  # rms | layer (mean taken away)
    offset: float = 0.0  # added to the weight as stored
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts in place of a layer's MLP.

    `names`: the router, then gate, up and down of an expert with {} for its index (no gate where MLPs have none); or
    router, gate over up and down of all experts in one tensor each, by the tensors' whole names.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    names: tuple[str, ...]
    renormalized: bool = True  # the chosen experts' probabilities are made to sum to one
    shared_size: int = 0  # intermediate size of the expert that every token visits; 0: none
    shared_names: tuple[str, ...] = ()  # of that expert: what decides how much of it ("": all), then gate, up and down
    bias: bool = False  # of the router and of every expert's linears
    inputs_first: bool = False  # tensors of all experts are [experts, in, out]
    interleaved: bool = False  # a gate and its up stand side by side among the outputs
    scoring: str = "softmax"  # of a row's scores: softmax | sigmoid
    correction: str = ""  # the tensor that is added to scores where experts are chosen, not where they are weighed
    num_groups: int = 1  # of experts with neighbouring indices, equal in size
    num_chosen_groups: int = 1  # among whose experts is chosen
    group_best: int = 1  # of a group's highest scores as many are added to rank it
    scale: float = 1.0  # of the weights, at last
    scales_inputs: bool = False  # weights are of an expert's inputs, not of its outputs
    latent_size: int = 0  # of the rows that experts read and write; 0: the hidden size
    latent_names: tuple[str, ...] = ()  # what makes such rows of hidden states, and back
    stacked_names: tuple[str, ...] = ()  # in place of `names` where the folder has the tensors of all experts in one

    def __post_init__(self) -> None:
        """Raise ValueError where more are chosen than there are."""
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
        """Return whether one tensor holds all experts."""
        return "{}" not in self.names[-1]

    @property
    def is_plain(self) -> bool:
        """Return whether a row's experts are those with its highest scores, weighed by their softmax."""
        grouped = self.num_groups > 1 or self.correction or self.scoring != "softmax" or self.scale != 1
        return not grouped and (not self.shared_size or bool(self.shared_names[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Latent attention (MLA): keys and values of all heads are products of one short row, which alone is kept. A head
    has `nope_dim` elements that meet that row and `rope_dim` that meet the key of its position, the same for all heads.
    """

    rank: int  # elements of the row
    rope_dim: int
    nope_dim: int
    value_dim: int  # of a head's output
    query_rank: int | None = None  # of the row that queries are made of; None: of the hidden state

    @property
    def row_dim(self) -> int:
        """Elements that are kept of a token, and that a query has once the products are absorbed."""
        return self.rope_dim + self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureSpec:
    """Of attention in layers without rope: the query at position p is multiplied by 1 + scale * log(1 + (p + 1) //
    every)."""

    scale: float
    every: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer has of its own."""

    window: int | None = None  # positions a token sees, itself included; None: all
    rope: int | None = 0  # which of the model's ropes; None: positions are not encoded
    experts: ExpertsSpec | None = None
    has_attention: bool = True
    state: StateSpec | None = None  # what mixes tokens in place of attention; where there are both, beside it
    has_mlp: bool = True


@dataclass(frozen=True, slots=True)
class PredictorSpec:
    """A layer behind the last that predicts the token behind the next one, of a row that `project` makes of a token's
    embedding and the hidden state before it, each normed."""

    layer: LayerSpec
    # As in TensorNames: of the layer, which is asked for behind the model's last, and of what stands around it, below
    # PREDICTOR: project, embedding_norm, features_norm, norm.
    renamed: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Of the outputs of a layer's linears: what their parts are multiplied by, in their order."""

    qkv: tuple[float, ...] = (1.0, 1.0, 1.0)
    output: tuple[float, ...] = (1.0,)
    gate_up: tuple[float, ...] = (1.0, 1.0)
    down: tuple[float, ...] = (1.0,)
    state: tuple[float, ...] = (1.0,) * 5  # gates, rows, what they write, what they read, steps
    state_output: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Modules of a layer, below `model.layers.N.`; "": there is no such norm. Several names: one above the other."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    output: str = "self_attn.o_proj"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    state: str = ""  # what mixes tokens by a state
    # Beginnings of names as they are written here, and as the checkpoint has them; the first that fits.
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
    # head: one weight for all heads | heads: each has its own | all: over the heads of a token | unit: where there is
    # rope each head is, without a weight
    qk_norm: str = ""
    attention_gate: bool = False  # q's module makes of each head a query, and gates of what it attends to
    parallel: bool = False  # attention and MLP read the same normed rows, and are added together
    # silu | gelu_tanh | relu2 (squared) | clamped_swiglu: (up + 1) * gate * sigmoid(alpha * gate), both clamped
    activation: str = "silu"
    swiglu_alpha: float = 1.0
    swiglu_limit: float = 0.0
    gated: bool = True
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    chunked: bool = False  # a token of a layer with a window sees what stands from the window's last multiple on
    temperature: TemperatureSpec | None = None
    latent: LatentSpec | None = None  # then head_dim is its row_dim, and there is one KV head
    num_extra_layers: int = 0  # in the files behind the last, which predict further tokens: no part of the model
    predictor: PredictorSpec | None = None  # the first of them
    sinks: bool = False  # each head has a score of its own that takes part in the softmax and has no value
    multipliers: Multipliers | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a half layer adds
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    unroped_context: int = 0  # of a model without rope

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that have KV."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.has_attention)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep a state of a sequence."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.state is not None)

    @property
    def state(self) -> StateSpec | None:
        """What its layers keep, all of them alike; None: nothing."""
        return next((layer.state for layer in self.layers if layer.state is not None), None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the layers that have KV."""
        return tuple(layer.window for layer in self.layers if layer.has_attention)

    @property
    def kv_window(self) -> int | None:
        """Return how many positions its farthest-seeing layer sees; None: all, or states are kept, which stand beside
        whole prefixes. KV further back is never read."""
        if not self.windows or None in self.windows or self.state is not None:
            return None
        return max(window for window in self.windows if window is not None)

    @property
    def part_window(self) -> int | None:
        """Return how many positions the farthest-seeing of its layers with a window sees, where others see all; None:
        there are not both, or states are kept."""
        found = [window for window in self.windows if window is not None]
        return max(found) if 0 < len(found) < len(self.windows) and self.state is None else None

    @property
    def context(self) -> int:
        """Tokens of a sequence, where nothing else is asked for."""
        return min((rope.context for rope in self.ropes), default=self.unroped_context)

    @property
    def longest_context(self) -> int:
        """Return the longest context that may be asked for: more than `context` for longrope only, which then takes its
        long factors."""
        return min(
            (max(rope.context, rope.max_position_embeddings) for rope in self.ropes), default=self.unroped_context
        )

    @property
    def name(self) -> str:
        return self.folder.stem if is_gguf(self.folder) else self.folder.name

    def differs_from_llama(self, experts: bool = False) -> str:
        """Return the first thing that a layer of the Llama family does not do, but for `experts`; "": all is as
        there."""
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
        """Return the weights of all layers' linears; `chosen_only`: of experts, those that one token meets."""
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
        """Return the weights of all experts among which routers choose; `chosen_only`: of those that one token
        meets."""
        found = [layer.experts for layer in self.layers if layer.experts is not None]
        counts = (experts.num_chosen if chosen_only else experts.num_experts for experts in found)
        sizes = ((e.latent_size or self.hidden_size) * e.intermediate_size for e in found)
        return (2 + self.gated) * sum(count * size for count, size in zip(counts, sizes, strict=True))

    def kv_group(self, form: str, block_size: int) -> KVGroup:
        """Return the layout of this model's KV in a pool: all layers have the same blocks."""
        kind = "paged" if self.latent is None else "latent"
        return KVGroup(kind, len(self.kv_layers), self.num_kv_heads, self.head_dim, form, block_size)

    def kv_layout(self, form: str, block_size: int) -> KVLayout:
        """Return the layout of a pool: its KV, and behind it what layers keep of a sequence."""
        groups = [self.kv_group(form, block_size)]
        if (state := self.state) is not None:
            num_rows = -(-state.num_elements // STATE_ROW)
            groups.append(KVGroup(STATE, len(self.state_layers), num_rows, STATE_ROW, "fp32", 1))
        return KVLayout(tuple(groups))
