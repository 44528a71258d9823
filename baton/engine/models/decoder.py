"""A decoder of any served family. What its layers do is described by data (core/model_spec.py)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.adapters.adapters import Adapter
from baton.engine.adapters.lora_folder import LoraFolder
from baton.engine.adapters.low_rank import ComposedLowRank, LowRanks, MakeLowRank
from baton.engine.adapters.native_low_rank import NativeLowRank
from baton.engine.attention.base import Attention
from baton.engine.attention.native import NativeAttention
from baton.engine.core.batch import AdapterRows, ForwardBatch
from baton.engine.core.device import instruction_set
from baton.engine.core.model_errors import ModelError
from baton.engine.core.model_spec import ModelSpec
from baton.engine.core.reproducible import computing_code
from baton.engine.kernels.sums import order_of_sums
from baton.engine.kv.pool import KVPool
from baton.engine.layers.activation import by_rows, make_between, soft_capped
from baton.engine.layers.embedding import tied
from baton.engine.layers.norm import RMSNorm
from baton.engine.layers.rope import Rope
from baton.engine.layers.row_parallel import RowParallelLinear
from baton.engine.layers.temperature import Temperature
from baton.engine.layers.vocabulary import VocabularyEmbedding, VocabularyHead
from baton.engine.models.experts import MakeRouter
from baton.engine.models.fused import FusedLayers, fuse
from baton.engine.models.layer import Layer
from baton.engine.models.linears import Linears, Make
from baton.engine.models.read_layer import (
    read_head,
    read_layer,
    read_low_ranks,
    read_norm,
    read_sinks,
    state_kernels,
)
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.shard import WHOLE
from baton.engine.parallel.stage import PipelineStage
from baton.engine.weights.formats.base import WeightSource
from kvtransfer.layout import KVGroup, KVLayout

if TYPE_CHECKING:
    from baton.engine.adapters.gpu_low_rank import GpuAdapters, StepAdapters

Apply = Callable[[str, Tensor], Tensor]  # name of a layer's linear, x -> y


class Model:
    """Hold a loaded model. Only one thread at a time may call `forward`, which uses the attention backend's scratch
    memory."""

    pools_own_layers = False  # true of a stage whose pool has room for its own layers only

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, source: WeightSource, make: Make, attention: Attention,
        ropes: Sequence[Rope], make_router: MakeRouter | None = None, collectives: Collectives | None = None,
        adapted: bool = False, stage: PipelineStage | None = None,
    ):  # fmt: skip
        """Read the model. `make(weight, bias)` returns the kernel for a weight of any form; `make_router`, of a model
        with experts, the fp32 kernel of a router. `collectives`: of a rank that has a part of the model, for whose
        heads `attention` is made; raises ModelError if that is not native. `adapted`: adapters will be read. `stage`:
        only its layers are here."""
        self.spec, self.dtype, self.attention, self.ropes, self._make = spec, dtype, attention, ropes, make
        self.device = attention.shape.device
        self._between = make_between(spec)
        self.reasons: dict[str, dict[str, str]] = {}  # attention | linear | layers -> backend -> reason against it
        self.collectives = collectives
        stage = PipelineStage(0, range(spec.num_layers)) if stage is None else stage
        self.own_layers, linears = stage.layers, Linears(source, make, collectives)
        self._read_weights(source, linears, make_router, has_ends=stage.index == 0)
        self._row_multiple = linears.row_multiple
        self.weights = linears.report()
        self.fused, self.reasons["layers"] = fuse(spec, self.layers, attention, ropes, collectives, adapted)
        unfit = (layer.experts.unfit for layer in self.layers if layer is not None and layer.experts is not None)
        if why := next(filter(None, unfit), ""):
            self.reasons["layers"]["grouped experts"] = why
        self._adapted = adapted
        self._make_low_rank, self._gpu_adapters = self._choose_low_rank()
        pooled = [layer for layer in spec.kv_layers if not self.pools_own_layers or layer in self.own_layers]
        self._kv_index = {layer: index for index, layer in enumerate(pooled)}
        self._temperature = None
        if spec.temperature is not None:
            self._temperature = Temperature(spec.temperature, spec.longest_context, self.device)
        self._num_gates = attention.shape.num_heads if spec.attention_gate else 0
        self._state_index = {layer: index for index, layer in enumerate(spec.state_layers)}
        mixers = (layer.state for layer in self.layers if layer is not None)
        self._mixer = next((mixer for mixer in mixers if mixer is not None), None)
        if collectives is not None and collectives.shares_memory and attention.name != NativeAttention.name:
            raise ModelError(
                f"tensor_parallel {collectives.shard.degree}: needs native attention; what was chosen is {attention.name}"
            )

    def _read_weights(
        self, source: WeightSource, linears: Linears, make_router: MakeRouter | None, has_ends: bool
    ) -> None:
        """Read the layers of this process and, with `has_ends`, the embedding, the last norm and the head."""
        spec, collectives = self.spec, self.collectives
        shard = WHOLE if collectives is None else collectives.shard
        if has_ends:
            self.embedding = source.embedding(spec.vocab_size, spec.hidden_size)
        self.layers = [
            read_layer(spec, index, source, linears, make_router, shard) if index in self.own_layers else None
            for index in range(spec.num_layers)
        ]
        if spec.sinks:
            self.attention.set_sinks(read_sinks(spec, source, shard, self.own_layers))
        if has_ends:
            self.norm = read_norm(spec.norm, source, "model.norm", spec.hidden_size)
            self.head = read_head(spec, source, linears, self.embedding)
            if spec.tied:
                self.embedding = tied(self.embedding, self.head)
            if collectives is not None:
                self.embedding = VocabularyEmbedding(self.embedding, spec.vocab_size, collectives)
                self.head = VocabularyHead(self.head, spec.vocab_size, collectives)
        others = (index for index in range(spec.num_layers + spec.num_extra_layers) if index not in self.own_layers)
        not_here = (*(f"model.layers.{index}" for index in others), *linears.left_out)
        source.check_all_read("model.layers.", tuple(f"{module}." for module in not_here))
        source.release()

    def _choose_low_rank(self) -> "tuple[MakeLowRank, GpuAdapters | None]":
        """Return the maker of adapters' low-rank pairs, and what holds them on a GPU."""
        if self.layers_name == FusedLayers.name:
            return NativeLowRank, None
        if self._adapted and self.weights.kernels == ("triton",):
            from baton.engine.adapters.gpu_low_rank import GpuAdapters, GpuLowRank  # triton is an optional dependency

            return GpuLowRank, GpuAdapters(self.device)
        return partial(ComposedLowRank, self._make), None

    @property
    def numerics(self) -> tuple[str, ...]:
        """Return what the bits of KV depend on besides weights and dtypes: kernels, instruction set, code and order of
        sums, rope factors."""
        is_fast = self.collectives is not None and self.collectives.fast
        capability = f"{instruction_set(self.device)}+{computing_code()}"
        attention, linears = self.attention.name, "+".join(sorted(self.weights.kernels))
        if any("triton" in name for name in (attention, self.layers_name, linears)):
            capability = f"{capability}+{order_of_sums()}"
        variants = dict.fromkeys(variant for rope in self.ropes for variant in rope.variant)
        if self.spec.state is not None:
            order = "state" if is_fast else "state-tree"  # of norms and products over the parts of all ranks
            folded_by = state_kernels(self.spec.state) if self._mixer is None else self._mixer.name
            variants[f"{order}-{folded_by}"] = None
        sums = [f"tree{self.weights.num_leaves}"] if self.weights.num_leaves > 1 else []
        if is_fast:
            assert self.collectives is not None
            sums = [f"ranks{self.collectives.shard.degree}"]
        return (attention, self.layers_name, linears, *sums, capability, *variants)

    def read_adapter(self, folder: Path) -> LoraFolder:
        """Read an adapter for this model. Raises ModelError if it is not an adapter or does not suit this model."""
        if self.spec.latent is not None or self.spec.state is not None:
            why = "latent attention" if self.spec.state is None else "layers with a state"
            raise ModelError(f"{folder}: adapters are not served on {why}")
        return LoraFolder(folder)

    def make_adapter(self, name: str, lora: LoraFolder) -> Adapter:
        """Make an adapter ready for the layers here. Raises ModelError if it has another base, or if the GPU has no
        memory for it."""
        try:
            return self._made_ready(name, lora)
        except torch.cuda.OutOfMemoryError:
            advice = "lower gpu_memory_utilization, or give adapter_slots and fewer of them"
            raise ModelError(f"{lora.folder}: the GPU has no memory left for this adapter; {advice}") from None

    def _made_ready(self, name: str, lora: LoraFolder) -> Adapter:
        shard = WHOLE if self.collectives is None else self.collectives.shard
        low_ranks = LowRanks(lora, self._make_low_rank, self.dtype, self.device, shard.range_of)
        layers = [read_low_ranks(self.spec, index, low_ranks, shard) for index in range(self.spec.num_layers)]
        lora.check_all_read()
        own = (each if index in self.own_layers else {} for index, each in enumerate(layers))
        adapter = Adapter(name, lora, tuple(own))
        if self._gpu_adapters is not None:
            self._gpu_adapters.warm_up(adapter, self.dtype)
        if self.device.type == "cuda":  # steps may run on another stream than this thread's
            torch.cuda.current_stream(self.device).synchronize()
        return adapter

    @property
    def backends(self) -> dict[str, str]:
        """Return the backend chosen for each kind of kernel."""
        linear = "+".join(self.weights.kernels)
        return {"attention": self.attention.name, "linear": linear, "layers": self.layers_name}

    @property
    def details(self) -> list[str]:
        """Return a line for each kind of kernel: the one chosen, and the reason against each other."""
        return [
            f"{kind} {name}: " + ", ".join(f"not {other}: {why}" for other, why in self.reasons[kind].items())
            for kind, name in self.backends.items()
        ]

    @property
    def layers_name(self) -> str:
        """Return what runs the layers: fused (one native call), triton or torch."""
        return "torch" if self.fused is None else self.fused.name

    @property
    def capturable(self) -> bool:
        """Return whether decode steps may be captured in CUDA graphs. Rows of adapters are counted on the host, and so
        are those of experts that are not grouped."""
        experts = (layer.experts for layer in self.layers if layer is not None and layer.experts is not None)
        return self.attention.capturable and not self._adapted and all(each.grouped is not None for each in experts)

    @property
    def num_draft_elements(self) -> int:
        """Return the number of fp32 elements that a layer with a state keeps of a proposal's inputs."""
        assert self._mixer is not None
        return self._mixer.spec.conv_size + self._mixer.spec.num_scalars

    def kv_of(self, layers: range) -> list[int]:
        """Return the numbers, among the layers with KV, of those in `layers`."""
        return [self._kv_index[layer] for layer in layers if layer in self._kv_index]

    def kv_group(self, form: str, block_size: int) -> KVGroup:
        """Return the layout of this model's KV in a pool; a rank with its own pool has its own heads or layers only.
        `form` is a key of kvtransfer.layout.KV_FORMS."""
        group = self.spec.kv_group(form, block_size)
        if self.pools_own_layers:
            return replace(group, num_layers=len(self._kv_index))
        if self.collectives is None or self.collectives.shares_memory:
            return group
        return replace(group, num_kv_heads=self.attention.shape.num_kv_heads)

    def kv_layout(self, form: str, block_size: int) -> KVLayout:
        """Return the layout of a pool for this model; `form` as in `kv_group`."""
        if not self.pools_own_layers and (self.collectives is None or self.collectives.shares_memory):
            return self.spec.kv_layout(form, block_size)
        return KVLayout((self.kv_group(form, block_size),))

    def forward(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Write the KV of all tokens and return logits fp32 [R, vocab_size] of batch.logit_rows.

        `on_layer(layer)` is called when the KV of that layer is written, for all tokens of the step.
        """
        return self.logits(self.hidden(batch, pool, on_layer)[batch.logit_rows])

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Return the embedding rows of int64 [T], [T, hidden_size], for drafts."""
        return self.embedding(token_ids)

    def scored(self, features: Tensor) -> Tensor:
        """Return the head's outputs [R, vocab_size] for rows [R, hidden_size], unscaled, for drafts."""
        return self.head(features)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return rows that `hidden` returned after the final norm."""
        if self.fused is not None and isinstance(self.norm, RMSNorm):
            return self.fused.norm(hidden.contiguous(), self.norm.weight)
        return self.norm(hidden)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits fp32 [R, vocab_size] of rows [R, hidden_size] that `hidden` returned, in `out` if given."""
        logits = self.head(self.normed(hidden))
        logits = logits.float() if out is None else out.copy_(logits)
        if self.spec.logit_scale != 1:
            logits = logits * self.spec.logit_scale
        if self.spec.logit_softcap is not None:
            logits = soft_capped(logits, self.spec.logit_softcap)
        return logits if out is None or logits is out else out.copy_(logits)

    def hidden(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Write the KV of all tokens; return the output of the last layer before the final norm, [>= T, hidden_size],
        with the batch's rows first."""
        return self.run_layers(self._embed(batch.token_ids), batch, pool, on_layer)

    def run_layers(
        self, x: Tensor, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Do as `hidden` with the layers of this process. x: rows [T, hidden_size] from the layer before, which may be
        changed."""
        if self.fused is not None:
            return self.fused(x, batch, pool, on_layer)
        num_tokens = x.shape[0]
        missing = -num_tokens % self._row_multiple
        positions = F.pad(batch.positions, (0, missing))
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        tables = [rope.tables(positions, self.dtype) for rope in self.ropes]
        plan = self.attention.plan(batch, pool) if self._kv_index else None
        states = None if self._mixer is None else self._mixer.plan(batch, pool.states)
        factors = None if self._temperature is None else self._temperature(batch.positions)
        added = None if self._gpu_adapters is None else self._gpu_adapters.plan(batch.adapters)
        mixed = x.new_zeros(x.shape[0], self.attention.shape.num_heads, self.spec.head_dim)
        for index in self.own_layers:
            layer = self.layers[index]
            normed = x if layer.input_norm is None else layer.input_norm(x)
            apply = partial(self._apply, batch.adapters, added, index, layer)
            out = None
            if layer.state is not None:
                out = layer.state(normed, states, self._state_index[index])
            if layer.qkv is not None:
                heads = apply("qkv", normed).unflatten(1, (-1, self.spec.head_dim))
                heads, gates = heads.split((heads.shape[1] - self._num_gates, self._num_gates), dim=1)
                q = self._write_kv(layer, index, heads, tables, batch.slots, pool)
                if factors is not None and self.spec.layers[index].rope is None:
                    q = (q * factors).to(q.dtype)
                self.attention(plan, self._kv_index[index], q, mixed[:num_tokens])
                rows = mixed.flatten(1)
                attended = apply("output", rows * by_rows(torch.sigmoid, gates.flatten(1)) if self._num_gates else rows)
                out = attended if out is None else out + attended
                if on_layer is not None:  # only now: after this sum every rank has written its heads
                    on_layer(self._kv_index[index])
            x = self._add_residuals(layer, apply, x, normed, out)
        return x

    def _embed(self, token_ids: Tensor) -> Tensor:
        x, scale = self.embedding(token_ids), self.spec.embedding_scale
        return x if scale == 1 else x * torch.tensor(scale, dtype=x.dtype)

    def _apply(
        self,
        adapters: Sequence[AdapterRows],
        added: "StepAdapters | None",
        index: int,
        layer: Layer,
        name: str,
        x: Tensor,
    ) -> Tensor:
        """Return the product of rows x and a linear of a layer, plus what their adapters add. For inputs divided among
        ranks adapters use those of all ranks, so that the bits are those of one process."""
        linear = getattr(layer, name)
        y = linear(x)
        if isinstance(linear, RowParallelLinear) and any(name in rows.adapter.layers[index] for rows in adapters):
            x = linear.inputs_of_all(x)
        if added is not None:
            added.add(index, name, x, y)
            return y
        for begin, end, adapter in adapters:
            if (pair := adapter.layers[index].get(name)) is not None:
                y[begin:end] += pair(x[begin:end])
        return y

    def _add_residuals(self, layer: Layer, apply: Apply, x: Tensor, normed: Tensor, attended: Tensor | None) -> Tensor:
        """Add the outputs of attention and MLP to the rows x. `normed`: the inputs of attention; `attended`: its
        outputs, None if the layer is only an MLP."""
        if attended is None:
            return x + self._scaled(self._mlp(layer, apply, layer.mlp_norm(x)))
        if layer.attention_out_norm is not None:
            attended = layer.attention_out_norm(attended)
        if self.spec.parallel:
            return x + self._scaled(attended) + self._scaled(self._mlp(layer, apply, normed))
        x = x + self._scaled(attended)
        if not layer.has_mlp:
            return x
        out = self._mlp(layer, apply, x if layer.mlp_norm is None else layer.mlp_norm(x))
        return x + self._scaled(out if layer.mlp_out_norm is None else layer.mlp_out_norm(out))

    def _scaled(self, added: Tensor) -> Tensor:
        return added if self.spec.residual_scale == 1 else added * self.spec.residual_scale

    def _mlp(self, layer: Layer, apply: Apply, x: Tensor) -> Tensor:
        if layer.experts is not None:
            return layer.experts(x)
        return apply("down", self._between(apply("gate_up", x)))

    def _write_kv(
        self, layer: Layer, index: int, heads: Tensor, tables: list[tuple[Tensor, Tensor]], slots: Tensor, pool: KVPool
    ) -> Tensor:
        """Norm and rotate `heads` [T, q, k and v, head_dim], write K and V to the pool, and return the queries [T,
        num_heads, head_dim]."""
        spec, counts = self.spec, (self.attention.shape.num_heads, self.attention.shape.num_kv_heads)
        num_values = heads.shape[1] - sum(counts)  # 0 if a row is both key and value
        qk, v = heads.split((sum(counts), num_values), dim=1)
        if layer.q_norm is not None:
            q, k = qk.split(counts, dim=1)
            q = self._norm_heads(layer.q_norm, q, spec.num_heads)
            qk = torch.cat((q, self._norm_heads(layer.k_norm, k, spec.num_kv_heads)), dim=1)
        num_tokens = slots.shape[0]
        rope = spec.layers[index].rope
        turned = qk if rope is None else self.ropes[rope](qk, *tables[rope])
        q, k = turned[:num_tokens].split(counts, dim=1)
        pool.write(self._kv_index[index], slots, k, *([v[:num_tokens]] if num_values else ()))
        return q

    def _norm_heads(self, norm, heads: Tensor, num_heads: int) -> Tensor:
        """Norm heads [T, heads, head_dim], each by itself or all `num_heads` of a token together."""
        if self.spec.qk_norm != "all":
            return norm(heads)
        if self.collectives is None:
            return norm(heads.flatten(1)).view(heads.shape)
        gathered = self.collectives.gather(heads)
        assert gathered is not None
        copies = len(gathered) * heads.shape[1] // num_heads  # ranks that have the same heads
        normed = norm(gathered[::copies].transpose(0, 1).flatten(1)).view(-1, num_heads, heads.shape[2])
        first = self.collectives.shard.rank // copies * heads.shape[1]
        return normed[:, first : first + heads.shape[1]]
