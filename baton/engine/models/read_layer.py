"""Read one layer of a model as its spec describes it, and the low-rank pairs that an adapter adds to it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton.engine.adapters.low_rank import LowRank, LowRanks
from baton.engine.core.model_spec import ModelSpec, Multipliers, NormSpec
from baton.engine.core.state_spec import DeltaNetSpec, Mamba2Spec, MambaSpec, StateSpec
from baton.engine.layers.activation import VECTOR_STRIDE
from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.linear.joined import ScaledLinear
from baton.engine.layers.norm import Norm, WideNorm, make_norm
from baton.engine.layers.rope import order_of_head
from baton.engine.models.experts import Experts, MakeRouter
from baton.engine.models.latent import read_latent
from baton.engine.models.layer import Layer
from baton.engine.models.linears import Linears
from baton.engine.parallel.shard import Shard
from baton.engine.parallel.state_part import StatePart
from baton.engine.recurrent import delta_net, mamba, mamba2
from baton.engine.recurrent.delta_net import DeltaNetMixer, DeltaNetParameters
from baton.engine.recurrent.mamba import MambaMixer, MambaParameters
from baton.engine.recurrent.mamba2 import Mamba2Mixer, Mamba2Parameters
from baton.engine.recurrent.mixer import Mixer
from baton.engine.weights.formats.base import HEAD, WeightSource
from baton.engine.weights.merge import pad

if TYPE_CHECKING:
    from baton.engine.recurrent.gpu import GpuDeltaNet, GpuMamba, GpuMamba2, GpuMixer


def read_layer(
    spec: ModelSpec, index: int, source: WeightSource, linears: Linears, make_router: MakeRouter | None, shard: Shard
) -> Layer:
    """Return the part `shard` of layer `index`. Raises ModelError if a tensor is missing or does not fit."""
    prefix, hidden, names = f"model.layers.{index}.", spec.hidden_size, spec.names

    def norm(name: str) -> Norm | None:
        return read_norm(spec.norm, source, prefix + name, hidden) if name else None

    order, of = _order(spec, index), spec.layers[index]
    heads, kv_heads = shard.range_of(spec.num_heads), shard.kv_heads(spec.num_kv_heads)

    def head_norm(name: str, num_heads: int, own: range) -> Norm | None:
        if not of.has_attention or not spec.qk_norm:
            return None
        if spec.qk_norm == "unit":  # a rope without factor changes no length, so it may follow
            return None if of.rope is None else WideNorm(spec.norm, torch.ones(spec.head_dim, device=source.device))
        return _read_head_norm(spec, source, f"{prefix}self_attn.{name}", num_heads, order, own)

    qkv, output = _read_attention(spec, prefix, order, source, linears, shard) if of.has_attention else (None, None)
    experts, gate_up, down = of.experts, None, None
    if experts is not None:
        experts = Experts(spec, experts, prefix, source, linears, make_router)
    elif of.has_mlp:
        gate_up, down = _read_mlp(spec, prefix, linears)
    state = None if of.state is None else read_mixer(spec, of.state, prefix + names.state, source, linears)
    if (by := spec.multipliers) is not None:
        width = len(shard.range_of(spec.intermediate_size + -spec.intermediate_size % VECTOR_STRIDE))
        gate_up, down = scaled(gate_up, by.gate_up, [width, width]), scaled(down, by.down, [hidden])
    return Layer(
        input_norm=norm(names.before_attention) if of.has_attention or of.state else None,
        qkv=qkv,
        q_norm=head_norm("q_norm", spec.num_heads, heads),
        k_norm=head_norm("k_norm", spec.num_kv_heads, kv_heads),
        output=output,
        mlp_norm=norm(names.before_mlp) if of.has_mlp else None,
        gate_up=gate_up,
        down=down,
        attention_out_norm=norm(names.after_attention),
        mlp_out_norm=norm(names.after_mlp),
        experts=experts,
        state=state,
    )


def _read_attention(
    spec: ModelSpec, prefix: str, order: torch.Tensor | None, source: WeightSource, linears: Linears, shard: Shard
) -> tuple[LinearKernel, LinearKernel]:
    """Return the products for a rank's queries, keys and values, and for the output of its heads."""
    heads, kv_heads = shard.range_of(spec.num_heads), shard.kv_heads(spec.num_kv_heads)
    if spec.latent is not None:
        qkv, output = read_latent(spec, f"{prefix}self_attn.", order, source, linears, heads)
    else:
        qkv = _read_qkv(spec, prefix, order, linears, heads, kv_heads)
        inputs = spec.num_heads * spec.head_dim
        output = linears.read(
            [prefix + spec.names.output], [spec.hidden_size], inputs, spec.output_bias, row_parallel=True
        )
    if (by := spec.multipliers) is not None:
        sizes = [len(heads) * spec.head_dim, *[len(kv_heads) * spec.head_dim] * 2]
        qkv, output = scaled(qkv, by.qkv, sizes), scaled(output, by.output, [spec.hidden_size])
    return qkv, output


def scaled(kernel: LinearKernel | None, factors: tuple[float, ...], sizes: Sequence[int]) -> LinearKernel | None:
    """Return a kernel whose outputs, in parts of `sizes`, are multiplied by `factors`; the same kernel if all are 1."""
    if kernel is None or all(factor == 1 for factor in factors):
        return kernel
    return ScaledLinear(kernel, torch.cat([torch.full((size,), by) for by, size in zip(factors, sizes, strict=True)]))


def read_mixer(
    model: ModelSpec, spec: StateSpec, module: str, source: WeightSource, linears: Linears
) -> "Mixer | GpuMixer":
    """Return a rank's part of a layer that mixes tokens by a state. Raises ModelError if a tensor is missing or does
    not fit."""
    part: StatePart = StatePart(spec, linears.shard)
    if isinstance(spec, DeltaNetSpec):
        return _read_delta_net(model, part, module, source, linears)
    if isinstance(spec, MambaSpec):
        return _read_mamba(model, part, module, source, linears)
    assert isinstance(spec, Mamba2Spec)
    return _read_mamba2(model, part, module, source, linears)


def on_gpu(device: torch.device) -> bool:
    """Return whether Triton's kernels fold states on this device."""
    return device.type != "cpu"


def state_kernels(spec: StateSpec) -> str:
    """Return what folds states of these sizes on a CPU: native or torch. Stages without such a layer report it too."""
    if isinstance(spec, DeltaNetSpec):
        why = delta_net.unfit(spec)
    elif isinstance(spec, MambaSpec):
        why = mamba.unfit(spec)
    else:
        assert isinstance(spec, Mamba2Spec)
        why = mamba2.unfit(spec)
    return "torch" if why else "native"


def _taps_first(weight: Tensor, channels: Tensor) -> Tensor:
    """Transpose a convolution's weight [channels, 1, taps] -> fp32 [taps, channels of a part]."""
    return weight[channels].float().squeeze(1).t().contiguous()


def _read_mamba2(
    model: ModelSpec, part: StatePart[Mamba2Spec], module: str, source: WeightSource, linears: Linears
) -> "Mamba2Mixer | GpuMamba2":
    hidden, by, whole, spec = model.hidden_size, model.multipliers or Multipliers(), part.whole, part.spec
    weight = source.tensor(f"{module}.conv1d.weight", whole.conv_size, 1, spec.taps)

    def own(name: str, size: int, index: Tensor | slice) -> Tensor:
        return source.exact(f"{module}.{name}", size)[index].contiguous()

    heads, of_heads, channels = whole.num_heads, part.of_heads, part.channels
    parameters = Mamba2Parameters(
        conv_weight=_taps_first(weight, channels),
        conv_bias=own("conv1d.bias", whole.conv_size, channels) if spec.conv_bias else None,
        step_bias=own("dt_bias", heads, of_heads),
        decay=-own("A_log", heads, of_heads).exp(),
        skip=own("D", heads, of_heads),
        norm_weight=own("norm.weight", whole.inner_size, part.inner) if spec.norm_groups else None,
    )
    orders = [part.rows] if linears.shard.degree > 1 else []
    projection = linears.read(
        [f"{module}.in_proj"], [whole.projected_size], hidden, spec.projection_bias, orders=orders
    )
    output = linears.read([f"{module}.out_proj"], [hidden], whole.inner_size, spec.projection_bias, row_parallel=True)
    parts = [*[spec.inner_size] * 2, *[spec.num_groups * spec.state_size] * 2, spec.num_heads]
    projection, output = scaled(projection, by.state, parts), scaled(output, by.state_output, [hidden])
    if on_gpu(weight.device):
        from baton.engine.recurrent.gpu import GpuMamba2  # triton is an optional dependency

        return GpuMamba2(spec, parameters, projection, output, projection.batch_invariant)
    return Mamba2Mixer(part, parameters, projection, output, weight.dtype, linears.collectives)


def _read_mamba(
    model: ModelSpec, part: StatePart[MambaSpec], module: str, source: WeightSource, linears: Linears
) -> "MambaMixer | GpuMamba":
    hidden, spec, inner = model.hidden_size, part.spec, part.whole.inner_size
    weight, own, bias = source.tensor(f"{module}.conv1d.weight", inner, 1, spec.taps), part.inner, spec.projection_bias
    norms, selected = zip(("dt", "b", "c"), spec.selected_sizes, strict=True), sum(spec.selected_sizes)
    parameters = MambaParameters(
        conv_weight=_taps_first(weight, part.channels),
        conv_bias=source.exact(f"{module}.conv1d.bias", inner)[own].contiguous() if spec.conv_bias else None,
        selection=linears.read(
            [f"{module}.x_proj"], [selected], inner, False, rows=-selected % VECTOR_STRIDE, row_parallel=True
        ),
        norms=tuple(source.exact(f"{module}.{name}_layernorm.weight", size) for name, size in norms),
        steps=linears.read([f"{module}.dt_proj"], [inner], spec.step_rank, True, column_parallel=True),
        decay=-source.exact(f"{module}.A_log", inner, spec.state_size)[own].exp().t().contiguous(),
        skip=source.exact(f"{module}.D", inner)[own].contiguous(),
    )
    order = torch.arange(2 * inner).roll(inner)[part.rows]  # gates first
    projection = linears.read([f"{module}.in_proj"], [2 * inner], hidden, bias, orders=[order])
    output = linears.read([f"{module}.out_proj"], [hidden], inner, bias, row_parallel=True)
    if on_gpu(weight.device):
        from baton.engine.recurrent.gpu import GpuMamba  # triton is an optional dependency

        return GpuMamba(spec, parameters, projection, output, weight.dtype)
    return MambaMixer(part, parameters, projection, output, weight.dtype)


def _read_delta_net(
    model: ModelSpec, part: StatePart[DeltaNetSpec], module: str, source: WeightSource, linears: Linears
) -> "DeltaNetMixer | GpuDeltaNet":
    whole, spec = part.whole, part.spec
    heads, inner, channels = whole.num_heads, whole.inner_size, whole.conv_size
    weight = source.tensor(f"{module}.conv1d.weight", channels, 1, spec.taps)
    parameters = DeltaNetParameters(
        conv_weight=_taps_first(weight, part.channels),
        step_bias=source.exact(f"{module}.dt_bias", heads)[part.of_heads].contiguous(),
        decay=-source.exact(f"{module}.A_log", heads)[part.of_heads].exp(),
        norm_weight=source.exact(f"{module}.norm.weight", spec.value_dim),
    )
    read = _read_split if spec.is_split else _read_by_key_head
    projection = read(part, module, linears, model.hidden_size)
    output = linears.read([f"{module}.out_proj"], [model.hidden_size], inner, False, row_parallel=True)
    if on_gpu(weight.device):
        from baton.engine.recurrent.gpu import GpuDeltaNet  # triton is an optional dependency

        return GpuDeltaNet(spec, parameters, projection, output, projection.batch_invariant)
    return DeltaNetMixer(part, parameters, projection, output, weight.dtype, linears.collectives)


def _read_split(part: StatePart[DeltaNetSpec], module: str, linears: Linears, hidden_size: int) -> LinearKernel:
    """Read a projection stored as gates, channels, and how much each head writes and forgets."""
    heads, modules = part.whole.num_heads, [f"{module}.in_proj_{name}" for name in ("z", "qkv", "b", "a")]
    sizes = [part.whole.inner_size, part.whole.conv_size, heads, heads]
    of_heads = torch.arange(heads)[part.of_heads]
    own = [torch.arange(part.whole.inner_size)[part.inner], part.channels, of_heads, of_heads]
    return linears.read(modules, sizes, hidden_size, False, orders=own if linears.shard.degree > 1 else ())


def _read_by_key_head(part: StatePart[DeltaNetSpec], module: str, linears: Linears, hidden_size: int) -> LinearKernel:
    """Read a projection stored by key head: q, k, and v and z of the heads that it serves; then how much those write
    and forget."""
    whole, spec = part.whole, part.spec
    heads, size = whole.num_heads, whole.conv_size + whole.inner_size
    served = heads // whole.num_key_heads
    rows = torch.arange(size).view(whole.num_key_heads, -1)
    query, key, value, gates = rows.split((*[spec.key_dim] * 2, *[served * spec.value_dim] * 2), dim=1)
    wide = torch.cat([each.flatten() for each in (gates, query, key, value)])
    scalars = torch.arange(2 * heads).view(whole.num_key_heads, 2, served).transpose(0, 1).flatten()
    own, own_scalars = part.rows.split((spec.inner_size + spec.conv_size, spec.num_scalars))
    modules, orders = [f"{module}.in_proj_qkvz", f"{module}.in_proj_ba"], [wide[own], scalars[own_scalars - size]]
    return linears.read(modules, [size, 2 * heads], hidden_size, False, orders=orders)


def read_low_ranks(spec: ModelSpec, index: int, low_ranks: LowRanks, shard: Shard) -> dict[str, LowRank]:
    """Return what an adapter adds to the part `shard` of layer `index`, by the field of Layer: to attention, and to an
    MLP without experts. Raises ModelError for wrong shapes."""
    prefix = f"model.layers.{index}."
    heads, kv_heads = shard.range_of(spec.num_heads), shard.kv_heads(spec.num_kv_heads)
    sizes = [spec.hidden_size], spec.num_heads * spec.head_dim
    found = {
        "qkv": _read_qkv(spec, prefix, _order(spec, index), low_ranks, heads, kv_heads),
        "output": low_ranks.read([prefix + spec.names.output], *sizes, False),
    }
    if spec.layers[index].experts is None:
        found["gate_up"], found["down"] = _read_mlp(spec, prefix, low_ranks)
    return {name: pair for name, pair in found.items() if pair is not None}


def read_norm(spec: NormSpec, source: WeightSource, name: str, size: int) -> Norm:
    """Return a norm of rows of `size` elements."""
    bias = source.tensor(f"{name}.bias", size) if spec.bias else None
    return make_norm(spec, source.tensor(f"{name}.weight", size), bias)


def read_sinks(spec: ModelSpec, source: WeightSource, shard: Shard, layers: range) -> torch.Tensor:
    """Return the sinks of all layers, fp32 [layers, heads of this rank], with zeros for layers not in `layers`."""
    own = shard.range_of(spec.num_heads)
    found = {index: source.tensor(f"model.layers.{index}.self_attn.sinks", spec.num_heads) for index in layers}
    nothing = torch.zeros(spec.num_heads)
    return torch.stack([found.get(index, nothing)[own.start : own.stop] for index in range(spec.num_layers)]).float()


def read_head(
    spec: ModelSpec, source: WeightSource, linears: Linears, embedding: Callable[[Tensor], Tensor]
) -> LinearKernel:
    """Return a rank's part of the output head, equally large on every rank. `embedding`: as the source returned it.
    Raises ModelError if a tensor is missing or does not fit."""
    vocab_size, hidden = spec.vocab_size, spec.hidden_size
    missing = -vocab_size % linears.shard.degree
    if not spec.tied:
        return linears.read([HEAD], [vocab_size], hidden, bias=False, rows=missing, column_parallel=True)
    table = source.tied_head(embedding, vocab_size, hidden)
    return linears.make([linears.shard_outputs(pad(table, rows=missing))], num_outputs=vocab_size + missing)


def _order(spec: ModelSpec, index: int) -> torch.Tensor | None:
    rope = spec.layers[index].rope
    order = None if rope is None else order_of_head(spec.ropes[rope], spec.head_dim)
    return None if order is None else torch.tensor(order)


def _of_heads(order: torch.Tensor, heads: range) -> torch.Tensor:
    """Repeat the order of one head's elements for several heads."""
    return (torch.tensor(heads).unsqueeze(1) * len(order) + order).flatten()


def _read_qkv(
    spec: ModelSpec, prefix: str, order: torch.Tensor | None, linears: Linears | LowRanks, heads: range, kv_heads: range
):
    counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    sizes = [count * spec.head_dim for count in counts]
    orders = None
    if order is not None or len(heads) < spec.num_heads:
        plain = torch.arange(spec.head_dim)
        turned = plain if order is None else order
        orders = [_of_heads(turned, heads), _of_heads(turned, kv_heads), _of_heads(plain, kv_heads)]
    if len(spec.names.qkv) == 1:
        if orders is not None:
            starts = (0, sizes[0], sizes[0] + sizes[1])
            orders = [torch.cat([part + start for part, start in zip(orders, starts, strict=True)])]
        sizes = [sum(sizes)]
    modules = [prefix + name for name in spec.names.qkv]
    if spec.attention_gate:  # gates follow q, k and v: the module of q once more
        of_query = torch.arange(2 * sizes[0]).view(-1, 2, spec.head_dim)
        queries, gates = of_query[:, 0].flatten(), of_query[heads.start : heads.stop, 1].flatten()
        orders = orders or [torch.arange(size) for size in sizes]
        modules, sizes = [*modules, modules[0]], [2 * sizes[0], *sizes[1:], 2 * sizes[0]]
        orders = [queries[orders[0]], *orders[1:], gates]
    num_outputs = (sum(counts) + (spec.num_heads if spec.attention_gate else 0)) * spec.head_dim
    return linears.read(modules, sizes, spec.hidden_size, spec.qkv_bias, orders=orders or (), num_outputs=num_outputs)


def _read_mlp(spec: ModelSpec, prefix: str, linears: Linears | LowRanks):
    hidden, size, names = spec.hidden_size, spec.intermediate_size, spec.names
    padding = -size % VECTOR_STRIDE  # rows get the length that an activation needs
    modules = [prefix + name for name in names.gate_up]
    parts = (1 + spec.gated) // len(modules)
    sizes = [parts * size] * len(modules)
    gate_up = linears.read(modules, sizes, hidden, spec.mlp_bias, rows=padding, parts=parts, column_parallel=True)
    return gate_up, linears.read(
        [prefix + names.down], [hidden], size, spec.mlp_bias, columns=padding, row_parallel=True
    )


def _read_head_norm(
    spec: ModelSpec, source: WeightSource, name: str, num_heads: int, order: torch.Tensor | None, own: range
) -> Norm:
    """Return the norm of q or k, for the heads of this rank."""
    shape = {"head": (spec.head_dim,), "heads": (num_heads, spec.head_dim), "all": (num_heads * spec.head_dim,)}
    weight = source.tensor(f"{name}.weight", *shape[spec.qk_norm])
    if order is not None:
        device = weight.device
        order = _of_heads(order, range(num_heads)) if spec.qk_norm == "all" else order
        weight = weight[..., order.to(device)]
    if spec.qk_norm == "heads":
        weight = weight[own.start : own.stop]
    return make_norm(replace(spec.norm, bias=False), weight)
